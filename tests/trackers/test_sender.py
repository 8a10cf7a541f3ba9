"""What the thread of a tracker does when its process is killed, or the tracker fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktrainer.callbacks.trackers import sender, tracker
from ktrainer.callbacks.trackers.sender import Sender
from ktrainer.callbacks.trackers.tracker_run import Point, RunFacts, TrackerRun
from tests.trackers.test_final_rows import Record

Stores = dict[str, dict[int, float]]  # by token, the loss of each step


class Stored(TrackerRun):
    """A run in a dict, which is given as an argument; `acts` is called after each row."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        self.act = arguments["acts"]
        self.rows = arguments["stores"].setdefault(facts.token, {})

    def held(self) -> int:
        return max(self.rows, default=-1)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            assert point.step not in self.rows
            self.rows[point.step] = point.values["train/loss"]
            self.act()

    def close(self, reason: str | None) -> None: ...


def send(record: Record, stores: Stores, acts: Any = lambda: None) -> Any:
    """Send what is final; returns the problem, and the steps that are missing."""
    state, arguments = record.path.with_name("t.json"), {"stores": stores, "acts": acts}
    sends = Sender(Stored, arguments, record.path, state, (1, 0), live=True)
    sends.wake()
    missing = sends.close(None, 20.0)
    return sends.problem, missing


def fails() -> None:
    raise SystemExit(3)


def test_a_kill_while_rows_are_sent(tmp_path: Path) -> None:
    """Then training begins from scratch: the row that arrived is not one of that training."""
    record, stores = Record(tmp_path), {}
    record.start()
    record.rows(1, 2, 3)
    problem, missing = send(record, stores, fails)  # as if killed: nothing happens afterwards
    assert problem is not None
    assert missing == 3
    record.start()
    record.rows(1, 2, 3, value=0.5)
    assert send(record, stores) == (None, 0)
    assert list(stores.values()) == [{1: 1.0}, {1: 1.5, 2: 2.5}]


def test_rows_that_follow_a_failure_are_sent_once(tmp_path: Path) -> None:
    record, stores = Record(tmp_path), {}
    record.start()
    record.rows(1, 2, 3)
    send(record, stores, fails)
    assert send(record, stores) == (None, 0)
    assert list(stores.values()) == [{1: 1.0, 2: 2.0}]


def test_a_tracker_that_hangs_lacks_all_rows(tmp_path: Path) -> None:
    """Also those that were logged since it hangs."""
    record, stores, answers = Record(tmp_path), {}, threading.Event()
    record.start()
    record.rows(1, 2)
    state, arguments = tmp_path / "t.json", {"stores": stores, "acts": answers.wait}
    sends = Sender(Stored, arguments, record.path, state, (1, 0), live=True)
    sends.wake()
    while not stores or not next(iter(stores.values())):
        time.sleep(0.01)
    record.rows(3, 4, 5)
    assert sends.close("finished", 0.1) == 5
    assert sends.problem == "it did not answer within 0 s"
    answers.set()


def test_trackers_that_hang_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given the same half minute, by a clock that goes only in these waits, and has rows
    that are sent in it."""
    now, waits = 100.0, dict[str, list[float]]()
    monkeypatch.setattr(sender, "time", SimpleNamespace(monotonic=lambda: now))
    record, hangs, stores = Record(tmp_path), threading.Event(), dict[str, Stores]()
    record.start()
    record.rows(1, 2)
    trackers = [tracker.Tracker(name, {}, live=True) for name in ("wandb", "mlflow", "trackio")]
    acts = {"wandb": hangs.wait, "mlflow": hangs.wait, "trackio": lambda: None}
    for each in trackers:
        each.others = [other for other in trackers if other is not each]
        arguments = {"stores": stores.setdefault(each.name, {}), "acts": acts[each.name]}
        state = tmp_path / f"{each.name}.json"
        each._sender = Sender(Stored, arguments, record.path, state, (1, 0), live=True)
        join, waits[each.name] = each._sender._thread.join, []

        def waited(seconds: float, join: Any = join, name: str = each.name) -> None:
            nonlocal now
            waits[name].append(seconds)
            now += seconds
            if name == "trackio":
                join(20)

        monkeypatch.setattr(each._sender._thread, "join", waited)
    for each in trackers:
        hung = pytest.warns(UserWarning, match="it did not answer")
        with hung if each.name != "trackio" else nullcontext():
            each.close()
    assert waits == {"wandb": [30.0], "mlflow": [0.0], "trackio": [0.0]}
    assert list(stores["trackio"].values()) == [{1: 1.0}]
    hangs.set()
