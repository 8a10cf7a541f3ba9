"""The record of a run: exact numbers, whole lines, and each step once."""

from __future__ import annotations

import json
import math
import stat
import subprocess
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from ktrainer.runtime.code_version import code_version
from ktrainer.runtime.history_file import append, current_rows, read_events

EPOCH = 4  # steps


def write(path: Path, first: int, last: int, attempt: str, fit: int = 1) -> None:
    """The rows of steps `first` to `last`."""
    for step in range(first, last + 1):
        epoch = (step - 1) // EPOCH + 1
        append(path, "log", fit=fit, epoch=epoch, step=step, attempt=attempt, metrics={})
        if step % EPOCH == 0:
            append(path, "epoch", fit=fit, epoch=epoch, step=step, attempt=attempt, metrics={})


def kept(path: Path, fit: int = 1) -> list[tuple[str, int, str]]:
    rows = [row for row in current_rows(read_events(path)) if row["fit"] == fit]
    return [(row["event"], row["step"], row["attempt"]) for row in rows]


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 64, 2000, np.uint64).view(np.float64)
    singles = random.normal(size=2000).astype(np.float32)
    edge = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308]
    values = np.array([*bits, *singles.astype(np.float64), *edge])
    path = tmp_path / "history.jsonl"
    append(path, "log", step=1, epoch=1, metrics={str(i): float(v) for i, v in enumerate(values)})
    assert "NaN" not in path.read_text()  # that is no JSON
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (row,) = read_events(path)
    found = np.array([float(value) for value in row["metrics"].values()])
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(np.isnan(found), ~finite)
    np.testing.assert_array_equal(found[finite].view(np.int64), values[finite].view(np.int64))


def test_a_line_cut_anywhere_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 3, "a")
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last, len(whole)):  # killed after so many bytes
        path.write_bytes(whole[:size])
        complete = 3 if size == len(whole) - 1 else 2  # all but the end of the line
        assert [step for _, step, _ in kept(path)] == [1, 2, 3][:complete]
        write(path, 9, 9, "b")
        assert [step for _, step, _ in kept(path)] == [*[1, 2, 3][:complete], 9]
    path.write_bytes(b'\x00\xff\n[1]\n{"no": "event"}\n' + whole)
    assert [step for _, step, _ in kept(path)] == [1, 2, 3]


def test_lines_of_other_programs_and_versions_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 4, "1")
    for fields in (
        {"event": "log", "step": 1},
        {"event": "log", "epoch": 1, "step": 1, "metrics": {"a": "high"}},
        {"event": "log", "epoch": 1, "step": 1, "metrics": {"a": [1]}},
        {"event": "log", "fit": "one", "epoch": 1, "step": 1, "metrics": {}},
        {"event": "start", "step": 0, "epoch": 0},
        {"event": "start", "step": 0, "epoch": 0, "time": 1.0, "settings": []},
        {"event": "end"},
        {"event": "summary", "fit": 2},
        {"event": 5},
    ):
        with path.open("a") as file:
            file.write(json.dumps(fields) + "\n")
    assert [event["event"] for event in read_events(path)] == [*["log"] * 4, "epoch"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    threads = [Thread(target=write, args=(path, 1, 50, "x" * 3000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(read_events(path))) == path.read_bytes().count(b"\n") == 4 * (50 + 12)


def test_steps_that_are_trained_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append(path, "start", fit=1, step=0, epoch=0)
    write(path, 1, 10, "a")
    append(path, "start", fit=1, step=6, epoch=1)  # killed, with a checkpoint of step 6
    write(path, 7, 9, "b")
    append(path, "ranks", fit=1, step=8, epoch=1)
    write(path, 9, 12, "c")
    whole = [("log", step, "abc"[(step > 6) + (step > 8)]) for step in range(1, 13)]
    whole.insert(4, ("epoch", 4, "a"))
    whole.insert(9, ("epoch", 8, "b"))
    # The second epoch was over before ranks were lost, but what follows its end was not.
    whole.remove(("epoch", 8, "b"))
    assert kept(path) == [*whole, ("epoch", 12, "c")]
    append(path, "rollback", fit=1, step=4, epoch=3)  # the data goes on, with the fourth epoch
    write(path, 5, 6, "d")
    steps = [step for event, step, _ in kept(path) if event == "log"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [step for event, step, _ in kept(path) if event == "epoch"] == [4, 12]


def test_a_fresh_start_of_a_script_takes_back_its_later_fits(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for fit in (1, 2):
        append(path, "start", fit=fit, step=0, epoch=0)
        write(path, 1, 3, "a", fit)
    append(path, "start", fit=1, step=3, epoch=0)  # resumed at its end
    assert [len(kept(path, fit)) for fit in (1, 2)] == [3, 3]
    append(path, "start", fit=2, step=2, epoch=0)
    assert [len(kept(path, fit)) for fit in (1, 2)] == [3, 2]
    append(path, "start", fit=1, step=0, epoch=0)
    assert [len(kept(path, fit)) for fit in (1, 2)] == [0, 0]


def test_long_records_are_read_without_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write(path, 1, 10, "a")
    append(path, "end", reason="finished")
    short = [(e["event"], e.get("step")) for e in read_events(path, only_last=("log",))]
    logs = [("log", 4), ("log", 8), ("log", 10)]
    assert short == [logs[0], ("epoch", 4), logs[1], ("epoch", 8), logs[2], ("end", None)]


def test_the_version_of_the_code(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        head = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run([*head, *words], capture_output=True, text=True, check=True).stdout

    def version() -> Any:
        code_version.cache_clear()
        return code_version(script)

    script = tmp_path / "train.py"
    script.write_text("one")
    assert version() == {}
    git("init", "--quiet")
    assert version() == {}  # without a commit
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert version() == {"commit": commit}
    script.write_text("two")
    changed = version()
    assert changed["commit"] == commit
    script.write_text("three")
    assert version()["changes"] not in ("", changed["changes"])
