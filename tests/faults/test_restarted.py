"""`ktrainer run --max-restarts`: from the last checkpoint, with back-off, never in circles."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktrainer.distributed import restart_records
from ktrainer.launch.failure_report import Failure
from ktrainer.launch.group_state import GroupEnd
from ktrainer.launch.rank_channel import Note
from ktrainer.launch.restarts import Restarts
from ktrainer.runs.run_differences import compare
from ktrainer.runs.run_record import RunRecord
from tests.launch.conftest import launch, script
from tests.launch.test_launch import ready, running
from tests.tf_distribute.launching import LAUNCH, QUIET, SERVERS, Start, start

__all__ = ["launch", "script", "start"]

Launch = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[[str], Path]

# The first start ends by a signal; the second one does the rest, and then the same without it.
TRAINS = """
import os, signal
import keras, numpy as np
from ktrainer import Callback, Trainer

class Faults(Callback):
    starts = int(os.environ["KTRAINER_RESTART"])

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.first = None

    def on_step_begin(self, step):
        if self.first is None:
            self.first = step
            print("start", self.starts, "from", step, flush=True)
        if self.starts == 0 and step == 3 and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dropout(0.2),
        keras.layers.Dense(3, name="head")])
    model.compile("adam", "mse")
    return model

def train(callbacks, **defaults):
    trainer = Trainer.from_cli(callbacks=callbacks, defaults={"seed": 1, **defaults})
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    history = trainer.fit(build, (x, x[:, :3])).history
    return history, [v.numpy().tobytes() for v in trainer.model.variables]

found = train([Faults()])
print("same", found == train([], run={"dir": "whole"}), flush=True)
"""
WORDS = ("trainer.epochs=2", "data.batch_size=16", "logging.progress=none", "world.deadline=20")
SAVES = ("checkpoint.every=2ba", "checkpoint.asynchronous=false")  # the faults come soon after one
ARGS = ("--max-restarts", 3, "--backoff", 0.1)


@pytest.mark.quick("mpi-local")
@pytest.mark.parametrize(
    ("engine", "local"),
    [("mpi", True), pytest.param("horovod", False, marks=pytest.mark.horovod)],
    ids=["mpi-local", "horovod-shared"],
)
def test_a_failed_group_resumes_from_its_last_checkpoint(
    start: Start, tmp_path: Path, engine: str, local: bool
) -> None:
    """In run folders that are named after the time; each rank with its own layers."""
    words = (*WORDS, "backend=data_parallel", f"backend.engine={engine}", *SAVES)
    words += ("backend.local_layers=[head]",) if local else ()
    path = tmp_path / "script.py"
    path.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{TRAINS}")
    launcher = start(*LAUNCH, "-n", 2, *ARGS, path, *words)
    out, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, errors
    said = [line for line in out.splitlines() if line.startswith("[0]")]
    assert said == ["[0] start 0 from 0", "[0] start 1 from 2", "[0] same True"], errors
    assert "[1] same True" in out.splitlines()
    assert "rank 1 was ended by signal 9 (SIGKILL: Killed)" in errors
    assert "starting again in 0.1 s, restart 1 of 3" in errors
    (folder,) = (tmp_path / "runs").iterdir()
    ended, whole = RunRecord(folder), RunRecord(tmp_path / "whole")
    found = compare(ended, whole)
    assert (found.first, found.alone, found.points) == ({}, (0, 0), 2)
    assert [(start["restart"], start["step"]) for start in ended.starts] == [(0, 0), (1, 2)]
    ends = [(event["reason"], event.get("rank")) for event in ended.events if "reason" in event]
    assert ends == [("failed", 1), ("finished", None)]


@pytest.mark.exhaustive
def test_a_cluster_is_started_again_after_the_loss_of_a_server(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        TRAINS.replace("self.world.rank == self.world.size - 1", "kill_server()")
        .replace("os.getpid(), signal.SIGKILL", "0, 0")
        .replace(
            "class Faults",
            """
import json
from pathlib import Path
pid_file = Path(__file__).with_name
pid_file(json.loads(os.environ["TF_CONFIG"])["task"]["type"]).write_text(str(os.getpid()))

def kill_server():
    os.kill(int(pid_file("ps").read_text()), signal.SIGKILL)
    return False

class Faults""",
        )
        .replace('print("same", found == train([], run={"dir": "whole"}), flush=True)', "")
        + "print('end', flush=True)\n"
    )
    words = (*SERVERS, *QUIET, *WORDS[:3], *SAVES, f"run.dir={tmp_path / 'run'}")
    words = (*LAUNCH, "--workers", 1, "--servers", 1, *ARGS, path, *words)
    launcher = start(*words)
    out, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, errors
    assert [line for line in out.splitlines() if "start" in line or "end" in line] == [
        "[0] start 0 from 0",
        "[0] start 1 from 2",
        "[0] end",
    ]
    assert "the coordinator lost ps 0" in errors


@pytest.mark.exhaustive
def test_no_progress_and_ends_that_were_chosen(launch: Launch, script: Script) -> None:
    words = "import os\nprint('start', os.environ['KTRAINER_RESTART'], flush=True)\n"
    done = launch("-n", 1, *ARGS, script(words + "raise ValueError('again and again')"))
    assert (done.returncode, done.stdout) == (1, "start 0\nstart 1\n")
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: again and again"
    assert "not started again: there was no new checkpoint between the last two" in done.stderr
    done = launch("-n", 1, *ARGS, script(words + "raise SystemExit(3)"))
    assert (done.returncode, done.stdout) == (3, "start 0\n")
    assert "not started again: the script chose to end" in done.stderr
    done = launch("-n", 1, *ARGS, script(words + "import ktrainer\nraise ktrainer.DataError('x')"))
    assert (done.returncode, done.stdout) == (1, "start 0\n")
    assert "after DataError another try would fail in the same way" in done.stderr


def test_a_signal_to_the_launcher_ends_it(
    script: Script, tmp_path: Path, within: Callable[..., None]
) -> None:
    marks = tmp_path / "pids"
    mark = f"import os, time\nwith open({str(marks)!r}, 'a') as f: f.write(f'{{os.getpid()}}\\n')\n"
    with running("-n", 2, *ARGS, script(mark + "time.sleep(60)")) as launcher:
        within(30, lambda: ready(marks), "ranks to be ready")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20) == 143
    assert len(ready(marks)) == 2


@pytest.mark.exhaustive
def test_a_signal_or_the_timeout_before_the_next_start(
    script: Script, launch: Launch, tmp_path: Path, start: Start
) -> None:
    """The wait is left; what had failed was told before."""
    fails = script("print('start', flush=True)\nraise ValueError('of the script')")
    env = {"TMPDIR": str(tmp_path)}
    words = (fails.rename(tmp_path / "fails.py"),)
    launcher = start(*LAUNCH, "-n", 1, "--max-restarts", 3, "--backoff", 60, *words, **env)
    for line in launcher.stderr or ():
        if "starting again in 60 s" in line:
            break
    launcher.send_signal(signal.SIGTERM)
    out, errors = launcher.communicate(timeout=20)
    assert (launcher.returncode, out) == (143, "start\n")
    assert errors == "ktrainer run: ended by SIGTERM\n"
    assert [path.name for path in tmp_path.iterdir()] == ["fails.py"]
    done = launch("-n", 1, "--timeout", 3, "--max-restarts", 3, "--backoff", 60, *words)
    assert (done.returncode, done.stdout) == (124, "start\n")
    assert done.stderr.splitlines()[-1] == "ktrainer run: ended after 3 seconds (--timeout)"


def saved(folder: Path, name: str, step: int) -> None:
    with (folder / "saves.jsonl").open("a") as file:
        file.write(json.dumps([name, step, "run"]) + "\n")


def test_progress_is_a_checkpoint_further_on(tmp_path: Path) -> None:
    """One more checkpoint of the same steps is none: a run that begins afresh each time."""
    again = Restarts(9, 2.0, tmp_path)
    killed, end = Failure(1, 137, "rank 1 was ended"), GroupEnd(started=True)
    assert again.why_not(end, killed) is None  # the first failure
    for name, step, restarts_follow in (
        ("a", 3, True),
        ("a", 3, False),
        ("a", 4, True),
        ("a-2", 1, True),  # of the script's second `fit`
    ):
        saved(tmp_path, name, step)
        assert (again.why_not(end, killed) is None) is restarts_follow, (name, step)
    again.count = 9
    saved(tmp_path, "a-2", 2)
    assert again.why_not(end, killed) == "not started again: that was restart 9 of 9"
    assert Restarts(9, 2.0, tmp_path).seconds == 2.0
    assert Restarts(9, 2.0, tmp_path, soon=3).seconds == 16.0
    assert Restarts(9, 2.0, tmp_path, soon=8).seconds == 60.0
    note = Note("failed", kind="ktrainer.errors.CheckpointError", final=True)
    assert Restarts(9, 2.0, tmp_path).why_not(GroupEnd(failures={1: note}, started=True), killed)
    assert Restarts(9, 2.0, tmp_path).why_not(GroupEnd(), killed)
    assert Restarts(0, 2.0, tmp_path).why_not(end, killed) == ""


def test_what_a_start_leaves_to_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(restart_records.RECORDS, str(tmp_path))
    restart_records.note_save(tmp_path / "checkpoints", 3, "first")
    assert restart_records.run_before(tmp_path / "checkpoints") is None  # it was this start itself
    monkeypatch.setenv(restart_records.COUNT, "1")
    assert restart_records.run_before(tmp_path / "checkpoints") == "first"
    assert restart_records.run_before(tmp_path / "others") is None
    with (tmp_path / "saves.jsonl").open("a") as file:
        file.write('["cut off", 1')
    assert list(restart_records.saves(tmp_path).values()) == [3]
    restart_records.note_save(tmp_path / "checkpoints", 5, "first")  # by the next start
    assert list(restart_records.saves(tmp_path).values()) == [5]


def test_run_folders_of_starts_whose_rank_0_may_be_lost(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(restart_records.RECORDS, str(tmp_path))

    def opened(name: str) -> str:
        """The folder that a process gets which has opened none before."""
        run_folder = runpy.run_path(restart_records.__file__)["run_folder"]
        return str(run_folder(lambda: tmp_path / name).name)

    assert [opened("one"), opened("two")] == ["one", "two"]
    monkeypatch.setenv(restart_records.COUNT, "1")  # ends before it comes to the second
    assert opened("new") == "one"
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('["/cut o')
    monkeypatch.setenv(restart_records.COUNT, "2")
    assert [opened("new"), opened("new"), opened("three")] == ["one", "two", "three"]
    monkeypatch.setenv(restart_records.COUNT, "3")
    assert [opened("new") for _ in range(3)] == ["one", "two", "three"]
