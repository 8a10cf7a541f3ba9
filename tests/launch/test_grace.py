"""How long ranks have to end in once they are asked to: as long as they say, but for `--grace`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ktrainer import Trainer
from ktrainer.distributed import launcher_events
from tests.launch.test_launch import running

# Rank 1 needs longer than rank 0 has said; neither ends by itself.
SCRIPT = """
import os, signal, sys, time
from ktrainer.distributed.launcher_events import report_grace
rank = os.environ["OMPI_COMM_WORLD_RANK"]
def end(*_):
    time.sleep(TAKES if rank == "1" else 60.0)
    print("done", flush=True)
    time.sleep(60)
signal.signal(signal.SIGTERM, end)
report_grace(5.0 if rank == "1" else 0.5)
with open("MARKS", "a") as marks:
    marks.write("here\\n")
time.sleep(60)
"""


@pytest.mark.quick("given1-False")
@pytest.mark.parametrize(("given", "in_time"), [((), True), (("--grace", 1), False)])
def test_the_longest_grace_that_a_rank_has_said_counts(
    script: Callable[[str], Path],
    tmp_path: Path,
    within: Callable[..., None],
    given: tuple[object, ...],
    in_time: bool,
) -> None:
    marks = tmp_path / "marks"
    takes = "1.5" if in_time else "20.0"
    path = script(SCRIPT.replace("MARKS", str(marks)).replace("TAKES", takes))
    with running("-n", 2, *given, path) as launcher:
        within(30, lambda: marks.exists() and marks.read_text().count("here") == 2, "ranks ready")
        time.sleep(0.3)  # the launcher reads what they say every tenth of a second
        asked = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output = launcher.stdout.read()
        assert launcher.wait(20) == 143, output
    assert ("[1] done" in output) == in_time, output
    assert time.monotonic() - asked < 15.0  # not the 30 seconds where no rank reports any


def test_a_trainer_says_the_grace_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[object]()
    monkeypatch.setattr(
        launcher_events, "listener", lambda event, **more: said.append((event, more))
    )
    with Trainer(overrides=["trainer.interrupt.grace=120"]):
        assert ("grace", {"seconds": 120.0}) in said
