"""`ktrainer watch`: a record that grows, is cut anywhere, goes back, and ends."""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ktrainer.cli.main import main
from ktrainer.runs import live_record, live_view
from ktrainer.runs.live_record import LiveRecord
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.folder_lock import FolderLock
from ktrainer.runtime.history_file import NAME, append
from tests.dist.harness.group import ROOT
from tests.processes import script, warm_python
from tests.runs.recorded import train
from tests.runs.test_report import check_lost_ranks

SCRIPT = Path(__file__).parent / "recorded.py"
START = {"step": 0, "epoch": 0, "epochs": 4, "steps_per_epoch": 50, "ranks": 2}
START["host"] = socket.gethostname()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The record of a run that was killed before update 8, and resumed."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    killed = script(SCRIPT, folder, 8, KERAS_BACKEND="tensorflow")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with (folder / NAME).open("ab") as file:
        file.write(b'{"event": "log", "fit": 1, "epoch": 2, "st')
    train(folder)
    return (folder / NAME).read_bytes()


class Watching:
    """`ktrainer watch` on a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._terminal, other = pty.openpty()
        command = [sys.executable, "-m", "ktrainer.cli.main", "watch", str(folder), *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env)
        os.close(other)
        self.seen = ""

    def until(self, text: str, seconds: float = 30.0) -> None:
        """Read until a text was shown."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert self._read(end), f"{text!r} was not shown:\n{self.seen}"

    def code(self, seconds: float = 30.0) -> int:
        """Its exit status; a terminal that nobody reads would stop it."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        return self.process.wait(5)

    def _read(self, end: float) -> bool:
        """Read more of what is shown; return whether there was any."""
        ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
        try:
            more = os.read(self._terminal, 1 << 16) if ready else b""
        except OSError:  # it has ended
            return False
        self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", more.decode(errors="replace"))
        return bool(more)


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The values by metric, from the record as it is now."""
    found: dict[str, dict[int, float]] = {}
    for row in RunRecord(folder).rows:
        for name, value in row["metrics"].items():
            found.setdefault(name, {})[row["step"]] = float(value)
    return {name: list(values.items()) for name, values in found.items()}


def test_a_record_that_grows_by_any_bytes(lines: bytes, tmp_path: Path) -> None:
    """What is known is at each moment what reading all of it anew gives."""
    path = tmp_path / NAME
    path.touch()
    live = LiveRecord(tmp_path)
    cuts = sorted({*range(0, len(lines), 997), len(lines)})
    # A line without its end may yet be written on: `watch` waits for that.
    cuts = [cut + (lines[cut : cut + 1] == b"\n") for cut in cuts]
    for low, high in itertools.pairwise(cuts):
        with path.open("ab") as file:
            file.write(lines[low:high])
        live.update()
        fresh = RunRecord(tmp_path, logs=False)
        complete = {name: values for name, values in live.curves.items() if values}
        assert complete == expected(tmp_path)
        assert (live.state, live.progress) == (fresh.state, fresh.progress)
        assert (live.best, live.directions) == (fresh.best, fresh.directions)
    assert live.state == ("finished", "")
    assert live.steps == 18
    path.write_bytes(lines[: len(lines) // 2])  # another file
    live.update()
    assert {name: values for name, values in live.curves.items() if values} == expected(tmp_path)


@pytest.mark.parametrize("longer", [0, 10])
def test_a_record_that_is_replaced(lines: bytes, tmp_path: Path, longer: int) -> None:
    """By one of the same size or a larger one, in place or by a rename."""
    path = tmp_path / NAME
    other = lines.replace(b'"pid": ', b'"pid": 1', 1).replace(b'"loss": 1', b'"loss": 7')
    other = other[: len(lines)] if not longer else other + other[: len(other) // longer]
    for replace in (path.write_bytes, lambda data: move(data, path)):
        path.write_bytes(lines)
        live = LiveRecord(tmp_path)
        before = dict(live.curves)
        replace(other)
        live.update()
        assert {name: values for name, values in live.curves.items() if values} == expected(
            tmp_path
        )
        assert live.curves != before


def move(data: bytes, path: Path) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


def test_rates_and_what_is_left(tmp_path: Path) -> None:
    append(tmp_path / NAME, "start", **START)
    live = LiveRecord(tmp_path)
    assert (live.steps, live.steps_per_second, live.seconds_left) == (200, None, None)
    for step in (10, 20, 30):
        row = {"step": step, "epoch": 1, "elapsed": 100 + step / 4, "metrics": {"loss": 1.0}}
        append(tmp_path / NAME, "log", **row)
    live.update()
    assert (live.steps_per_second, live.seconds_left) == (4.0, 42.5)
    append(tmp_path / NAME, "rollback", step=10, epoch=0)
    live.update()
    assert live.steps_per_second is None  # the time of the return is not that of steps
    assert live.curves["loss"] == [(10, 1.0)]


def test_the_end_of_a_run_that_went_back(tmp_path: Path) -> None:
    """To step 30, from the tenth update of the second epoch."""
    append(tmp_path / NAME, "start", **START, batch=0)
    append(tmp_path / NAME, "rollback", step=30, epoch=1, batch=10)
    assert LiveRecord(tmp_path).steps == 30 + 40 + 2 * 50
    append(tmp_path / NAME, "start", **{**START, "step": 60, "epoch": 1}, batch=40)
    assert LiveRecord(tmp_path).steps == 60 + 10 + 2 * 50


def test_no_end_is_known_after_going_back_in_epochs_of_unknown_length(tmp_path: Path) -> None:
    append(tmp_path / NAME, "start", **{**START, "steps_per_epoch": None}, batch=0)
    append(tmp_path / NAME, "epoch", step=50, epoch=1, elapsed=1.0, metrics={"loss": 1.0})
    assert LiveRecord(tmp_path).steps == 4 * 50
    append(tmp_path / NAME, "rollback", step=30, epoch=1, batch=10)
    assert LiveRecord(tmp_path).steps is None


def test_the_length_of_an_epoch_is_that_of_rows_that_count(tmp_path: Path) -> None:
    """Not of an epoch that was cut and is trained again, nor of another call of `fit`."""
    start, row = {**START, "steps_per_epoch": None}, {"elapsed": 1.0, "metrics": {"loss": 1.0}}
    append(tmp_path / NAME, "start", **start, batch=0)
    append(tmp_path / NAME, "epoch", step=50, epoch=1, **row)
    append(tmp_path / NAME, "epoch", step=60, epoch=2, **row)  # interrupted
    append(tmp_path / NAME, "start", **{**start, "step": 60, "epoch": 1}, batch=10)
    assert LiveRecord(tmp_path).steps == 4 * 50
    append(tmp_path / NAME, "rollback", step=55, epoch=1, batch=5)
    assert LiveRecord(tmp_path).steps is None
    append(tmp_path / NAME, "start", fit=2, **start, batch=0)
    assert LiveRecord(tmp_path).steps is None
    append(tmp_path / NAME, "epoch", fit=2, step=20, epoch=1, **row)
    assert LiveRecord(tmp_path).steps == 4 * 20


def test_long_records_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_record, "_AT_ONCE", 50_000)
    append(tmp_path / NAME, "start", **START)
    for step in range(1, 5001):
        append(tmp_path / NAME, "log", step=step, epoch=1, metrics={"loss": float(step)})
    live = LiveRecord(tmp_path)
    points = live.curves["loss"]
    assert 100 < len(points) <= live_record.MOST_POINTS
    assert points[-1] == (5000, 5000.0)
    assert all(step == value for step, value in points)
    assert len(live.events) == 2


def sparkline(values: Sequence[float], width: int) -> str:
    return live_view.sparkline(list(enumerate(values)), width)


def test_a_sparkline_goes_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many points of the newest steps a thinned curve holds."""
    monkeypatch.setattr(live_record, "MOST_POINTS", 200)
    append(tmp_path / NAME, "start", **START)
    for step in range(1, 4001):
        append(tmp_path / NAME, "log", step=step, epoch=1, metrics={"loss": step / 10})
    points = LiveRecord(tmp_path).curves["loss"]
    assert live_view.sparkline(points, 8) == "▁▂▃▄▅▆▇█"
    assert max(b[0] - a[0] for a, b in pairwise(points)) <= 4000 / 40
    assert points[-1] == (4000, 400.0)
    assert live_view.sparkline([(5, 2.0), (1, 1.0)], 8) == "▁█"
    assert live_view.sparkline([(0, 0.0), (90, 1.0), (91, 1.0)], 8) == "▁▁█"


def test_a_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 7, 7, 14, 14], 3) == "▁▄█"
    assert sparkline([1, 1], 8) == "▁▁"
    assert sparkline([0, float("nan"), float("inf"), 1], 8) == "▁!!█"
    assert sparkline([], 8) == ""


def test_the_state_is_printed_once(
    lines: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the output is no terminal."""
    (tmp_path / NAME).write_bytes(lines)
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    best = RunRecord(tmp_path).best["val_loss"]
    for text in ("finished", "epoch 3/3", "step 18/18", "val_loss", "continued after step 5"):
        assert text in out
    assert f"{best.value:.4g}" in out
    assert "\x1b" not in out
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    names = "\x1b[2J\x07\ud800 [red]"
    append(tmp_path / NAME, "start", step=0, epoch=0, fit=2, host=names)
    append(tmp_path / NAME, "log", step=1, epoch=1, fit=2, metrics={names: 1.0})
    append(tmp_path / NAME, "end", fit=2, reason="failed", why=names)
    assert main(["watch", str(tmp_path), "--once"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "?[2J?? [red]" in out


def test_a_run_is_followed_to_its_end(lines: bytes, tmp_path: Path) -> None:
    """On a terminal; the folder's lock is held as by a run."""
    (tmp_path / NAME).write_bytes(lines[: len(lines) // 3])
    lock = FolderLock(tmp_path, "run folder")
    watching = Watching(tmp_path, "--every", "0.1")
    watching.until("running")
    watching.until("loss")
    with (tmp_path / NAME).open("ab") as file:
        file.write(lines[len(lines) // 3 :])
    watching.until("continued after step 5")
    lock.release()
    watching.until("finished")
    assert watching.code() == 0


@pytest.mark.parametrize(
    "end, code",
    [({"reason": "failed", "why": "KeyError: 'x'"}, 1), ({"reason": "interrupted"}, 3), (None, 3)],
)
def test_the_status_is_that_of_the_end(tmp_path: Path, end: Any, code: int) -> None:
    append(tmp_path / NAME, "start", **START)
    if end is not None:
        append(tmp_path / NAME, "end", **end)
    then = time.time() - 60
    os.utime(tmp_path / NAME, (then, then))  # else it may yet be healed or say why
    watching = Watching(tmp_path)
    assert watching.code() == code


def test_a_restart_is_waited_for(tmp_path: Path) -> None:
    append(tmp_path / NAME, "start", **START)
    append(tmp_path / NAME, "end", reason="failed", why="rank 1: SIGKILL", restart=1.0)
    append(tmp_path / NAME, "checkpoint", step=3, path="step-3")  # which was being written
    then = time.time() - 60  # longer than a failed run is waited for
    os.utime(tmp_path / NAME, (then, then))
    watching = Watching(tmp_path, "--every", "0.1")
    watching.until("the launcher starts the run again")
    append(tmp_path / NAME, "start", **{**START, "step": 5, "restart": 1})
    append(tmp_path / NAME, "end", reason="finished")
    watching.until("continued after step 5 (restart 1)")
    assert watching.code() == 0


def test_ctrl_c_ends_the_watching(tmp_path: Path) -> None:
    append(tmp_path / NAME, "start", **START)
    lock = FolderLock(tmp_path, "run folder")
    watching = Watching(tmp_path)
    watching.until("running")
    watching.process.send_signal(signal.SIGINT)
    assert watching.code() == 130
    lock.release()


@pytest.mark.exhaustive
def test_a_real_run_is_watched(tmp_path: Path) -> None:
    """From its first moments; rank 1 is killed, and both start again from a checkpoint."""
    folder, hold = tmp_path / "run", tmp_path / "run.hold"
    hold.touch()
    command = [warm_python(), "-m", "ktrainer.cli.main", "run", "-n", "2", "--max-restarts", "1"]
    words = ["--no-warm", str(SCRIPT), str(folder), "8", "--", "backend=data_parallel"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"}
    run = subprocess.Popen([*command, *words], env=env, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (folder / NAME).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    watching = Watching(folder, "--every", "0.1")
    watching.until("starts the run again", 120)
    hold.unlink()
    watching.until("(restart 1)", 120)
    watching.until("finished", 120)
    assert watching.code() == 0
    assert run.wait(60) == 0
    check_lost_ranks(folder, "resume")
