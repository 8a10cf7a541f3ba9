"""What `ktrainer runs` says of real runs: finished, killed, interrupted, failed, running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer import Callback, Interrupted, Trainer
from ktrainer.cli.main import main
from ktrainer.errors import ConfigError
from ktrainer.launch.exit_report import record_end
from ktrainer.launch.failure_report import Failure
from ktrainer.launch.group_state import GroupEnd
from ktrainer.launch.rank_channel import Note
from ktrainer.runs.run_record import SILENT_SECONDS, RunRecord, find_runs, is_run
from ktrainer.runtime.folder_lock import is_held
from ktrainer.runtime.history_file import NAME, append
from tests.processes import python, script
from tests.runs import recorded
from tests.runs.recorded import EPOCHS, STEPS, Acts, Logged, train
from tests.small import BATCH, build, data, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged, Any]:
    """An undisturbed run: its folder, what the loop reported, and its History."""
    folder, logged = tmp_path_factory.mktemp("whole") / "run", Logged()
    history = train(folder, callbacks=[logged])
    return folder, logged, history


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The rows that count, but for times."""
    rows = RunRecord(folder).rows
    return [{k: v for k, v in row.items() if k not in ("time", "elapsed")} for row in rows]


def rewrite(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a run's record whose events are changed."""
    to.mkdir()
    events = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    lines = [json.dumps(event) for event in events if change(event) is not False]
    (to / NAME).write_text("\n".join(lines) + "\n")
    return to


def test_the_rows_are_what_the_loop_reports(whole: Any) -> None:
    folder, logged, history = whole
    rows = RunRecord(folder).rows
    assert {(row["event"], row["step"]): row["metrics"] for row in rows} == {
        key: {name: float(value) for name, value in logs.items()}
        for key, logs in logged.rows.items()
    }
    assert len(rows) == len(logged.rows) == EPOCHS * (STEPS + 1) + 4  # validations inside epochs
    for name, values in history.items():
        own = [row["metrics"].get(name) for row in rows if row["event"] == "epoch"]
        assert [value for value in own if value is not None] == values
    assert [row["epoch"] for row in rows if row["event"] == "epoch"] == [1, 2, 3]


def test_a_finished_run(whole: Any) -> None:
    folder, _, history = whole
    record = RunRecord(folder, logs=False)
    assert record.state == ("finished", "")
    assert record.progress == (EPOCHS, EPOCHS * STEPS)
    for name, choose in (("loss", np.argmin), ("accuracy", np.argmax)):
        best = record.best[name]
        assert (best.value, best.epoch) == (
            history[name][int(choose(history[name]))],
            int(choose(history[name])) + 1,
        )
    (start,) = record.starts
    assert (start["ranks"], start["settings"]["seed"], start["step"]) == (1, 3, 0)
    assert start["validates"] is True
    assert start["data"]["training/length"] == "24 rows"
    assert start["model"]["optimizer"]["momentum"] == 0.9
    saved = [event for event in record.events if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [5, 10, 15]
    assert record.checkpoint == Path(saved[-1]["path"])
    assert record.resume == "the same command"


def test_a_killed_run_and_its_resume(whole: Any, tmp_path: Path) -> None:
    """By SIGKILL in a process of its own; the record then holds each step once."""
    folder = tmp_path / "run"
    killed = script(recorded.__file__, folder, 8, KERAS_BACKEND="tensorflow")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    record = RunRecord(folder, logs=False)
    assert record.state == ("interrupted", "killed: its process has ended without a word")
    assert record.progress == (1, 8)
    assert record.checkpoint == folder / "checkpoints" / "step-00000005"
    with (folder / NAME).open("a") as file:
        file.write('{"event": "log", "fit": 1, "epoch": 2, "st')  # killed while it wrote
    train(folder)
    assert untimed(folder) == untimed(whole[0])
    again = RunRecord(folder)
    assert again.state[0] == "finished"
    assert [start["step"] for start in again.starts] == [0, 5]
    steps = [event["step"] for event in again.events if event["event"] == "log"]
    assert steps == [*range(1, 9), *range(6, 19)]  # nothing is removed from the file


def test_a_run_that_is_asked_to_end(tmp_path: Path) -> None:
    seen: list[Any] = []

    def ask() -> None:
        seen.append(RunRecord(tmp_path / "run").state)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(tmp_path / "run", callbacks=[Acts(7, ask)])
    assert seen == [("running", "")]
    record = RunRecord(tmp_path / "run")
    assert record.state == ("interrupted", "SIGTERM")
    assert record.checkpoint is not None
    assert record.checkpoint.name == "step-00000008"


def test_times_inside_an_epoch_are_no_progress(tmp_path: Path) -> None:
    """They may be the last that a run wrote which was killed after a signal."""
    where = {"epoch": 2, "elapsed": 1.0}
    append(tmp_path / NAME, "start", step=0, epoch=0)
    append(tmp_path / NAME, "log", step=13, metrics={"loss": 1.0}, **where)
    append(tmp_path / NAME, "times", step=13, ranks=[{"seconds": 1.0}], **where)
    assert RunRecord(tmp_path).progress == (1, 13)


def test_a_run_that_fails(tmp_path: Path) -> None:
    """In a fit; and in the body of a loop of the user's own."""

    def fail() -> None:
        raise ValueError("too long\nby far")

    with pytest.raises(ValueError, match="too long"):
        train(tmp_path / "run", callbacks=[Acts(3, fail)])
    record = RunRecord(tmp_path / "run")
    assert record.state == ("failed", "ValueError: too long")
    assert (record.progress, record.checkpoint, record.resume) == ((0, 3), None, None)
    folder = tmp_path / "loop"

    def loop_that_fails() -> None:
        with it.steps(data(), model=build(), optimizer=None) as steps:
            for _ in steps:
                steps.log(loss=1.0)
                if steps.step == 2:
                    raise KeyError("x")

    with trainer(run__dir=folder, logging__every="1ba") as it, pytest.raises(KeyError):
        loop_that_fails()
    loop = RunRecord(folder)
    assert loop.state == ("failed", "KeyError: 'x'")
    assert [row["step"] for row in loop.rows] == [1, 2]


def test_a_run_that_goes_back(tmp_path: Path) -> None:
    """To its last checkpoint, by `health.nan=rollback`."""

    def spoil() -> None:
        it.model.layers[-1].bias.assign([np.nan] * 3)

    words = ["health.nan=rollback", f"run.dir={tmp_path}", "checkpoint.every=2ba"]
    words += [f"data.batch_size={BATCH}", "logging.every=1ba", "logging.progress=none"]
    spoiler = Acts(4, spoil)
    with (
        Trainer(overrides=words, callbacks=[spoiler]) as it,
        pytest.warns(UserWarning, match="back to the checkpoint of step 4"),
    ):
        it.fit(build, data(40))
    record = RunRecord(tmp_path)
    backs = [event["step"] for event in record.events if event["event"] == "rollback"]
    assert backs == [4]
    steps = [row["step"] for row in record.rows if row["event"] == "log"]
    assert steps == list(range(1, it.progress.step + 1))


def test_on_another_host_signs_of_life_decide(whole: Any, tmp_path: Path) -> None:
    def elsewhere(event: dict[str, Any]) -> bool:
        event |= {"host": "far"} if event["event"] == "start" else {}
        return event["event"] != "end"

    folder = rewrite(whole[0], tmp_path / "far", elsewhere)
    state, why = RunRecord(folder).state
    assert (state, why.partition(":")[0]) == ("running", "on far")
    then = time.time() - SILENT_SECONDS - 60
    os.utime(folder / NAME, (then, then))
    assert RunRecord(folder).state == ("interrupted", "lost: no sign of life from far for 11 min")


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its rows."""
    monkeypatch.setattr("ktrainer.training.history_log.SIGN_SECONDS", 0.0)
    times: list[float] = []

    def look() -> None:
        times.append(RunRecord(tmp_path).last_sign)
        os.utime(tmp_path / NAME, (1, 1))
        assert is_held(tmp_path)

    train(tmp_path, "logging.every=1ep", callbacks=[Acts(1, look), Acts(2, look), Acts(3, look)])
    assert min(times) > time.time() - 60


def test_the_list(whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def killed(event: dict[str, Any]) -> bool:
        return event["event"] != "end" and event.get("step", 0) < 10

    rewrite(whole[0], tmp_path / "group", killed).rename(tmp_path / "killed")
    (tmp_path / "group").mkdir()
    rewrite(whole[0], tmp_path / "group" / "deep", lambda event: True)
    (tmp_path / "begun").mkdir()
    for name in ("config.yaml", "versions.json"):
        (tmp_path / "begun" / name).write_text("")
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "epoch", "step", "best", "started"]
    best = RunRecord(whole[0]).best
    (line,) = [line for line in lines if line.startswith("group/deep")]
    assert line.split()[1:4] == ["finished", "3/3", "18"]
    assert f"val_loss {best['val_loss'].value:.4g}, val_accuracy" in line
    (at,) = [k for k, line in enumerate(lines) if line.startswith("killed")]
    assert lines[at].split()[1:4] == ["interrupted", "1/3", "9"]
    assert lines[at + 1].strip().startswith("killed: ")
    assert lines[at + 2].strip() == "resume from step-00000015: the same command"
    (at,) = [k for k, line in enumerate(lines) if line.startswith("begun")]
    assert lines[at + 1].strip() == "training has not begun"
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = {Path(each["run"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert found["deep"]["best"]["loss"]["value"] == best["loss"].value
    assert found["killed"]["state"] == "interrupted"


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_runs(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no runs, up to 3 levels down"):
        find_runs(tmp_path)
    with pytest.raises(ConfigError, match=r"not the folder of a run: it has no history\.jsonl"):
        RunRecord(tmp_path)
    (tmp_path / NAME).mkdir()  # root can read everything but this
    for name in ("config.yaml", "versions.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        RunRecord(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    assert "cannot be read" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_both_commands_do_without_tensorflow(whole: Any) -> None:
    code = (
        "import sys; from ktrainer.cli.main import main; folder = sys.argv[1]\n"
        "assert main(['runs', folder]) == main(['compare', folder, folder]) == 0\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    done = python("-c", code, whole[0], cwd=Path.cwd())
    assert done.returncode == 0, done.stderr


def test_why_it_ended(tmp_path: Path) -> None:
    """Stopped by a callback; by an error without a text, by the script, and before the start."""

    class Textless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Begins(Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            raise ValueError("at the start:")

    def fail() -> None:
        raise Textless

    class Stops(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            self.trainer.request_stop("it is enough")

    train(tmp_path / "stopped", callbacks=[Stops()])
    for name, kind, callback in (
        ("textless", Textless, Acts(2, fail)),
        ("exit", SystemExit, Acts(2, lambda: sys.exit(3))),
        ("begins", ValueError, Begins()),
    ):
        with pytest.raises(kind):
            train(tmp_path / name, callbacks=[callback])
    assert {path.name: RunRecord(path).state for path in find_runs(tmp_path)} == {
        "stopped": ("finished", "stopped because it is enough"),
        "textless": ("failed", "Textless"),
        "exit": ("failed", "the script has called sys.exit(3)"),
        "begins": ("failed", "ValueError: at the start"),
    }


def test_a_record_that_cannot_be_written_does_not_end_training(tmp_path: Path, whole: Any) -> None:
    def spoil() -> None:
        (tmp_path / NAME).rename(tmp_path / "kept")
        (tmp_path / NAME).mkdir()  # which root cannot write either

    def mend() -> None:
        (tmp_path / NAME).rmdir()
        (tmp_path / "kept").rename(tmp_path / NAME)

    with pytest.warns(UserWarning, match="Is a directory. Training continues") as warned:
        train(tmp_path, callbacks=[Acts(2, spoil), Acts(8, mend)])
    assert len(warned) == 1
    lost = [row for row in untimed(whole[0]) if 2 < row["step"] <= 8]
    assert untimed(tmp_path) == [row for row in untimed(whole[0]) if row not in lost]
    assert RunRecord(tmp_path).state == ("finished", "")


def test_a_run_that_was_moved_or_copied(tmp_path: Path) -> None:
    """It has its own checkpoints, and is resumed where it is."""

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        train(tmp_path / "run", callbacks=[Acts(8, fail)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    train(tmp_path / "run")
    for name in ("copy", "moved"):
        record = RunRecord(tmp_path / name)
        assert record.checkpoint == tmp_path / name / "checkpoints" / "step-00000005"
        assert record.resume == f"the same command with run.dir={tmp_path / name}"
        if name == "copy":
            (tmp_path / "copy").rename(tmp_path / "moved")
    train(tmp_path / "moved")
    assert untimed(tmp_path / "moved") == untimed(tmp_path / "run")


def test_a_folder_that_cannot_be_read_hides_no_other(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readable(folder: Path) -> bool:  # root can read everything
        if folder.name == "private":
            raise PermissionError(13, "Permission denied", str(folder))
        return is_run(folder)

    (tmp_path / "private").mkdir()
    run = rewrite(whole[0], tmp_path / "run", lambda event: True)
    monkeypatch.setattr("ktrainer.runs.run_record.is_run", readable)
    assert find_runs(tmp_path) == [run]


def test_the_launcher_keeps_secrets_out(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the record is empty."""
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    folder = rewrite(whole[0], tmp_path / "run", lambda event: event["event"] != "end")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / NAME).touch()
    note = Note("failed", code=1, kind="ValueError", text="ValueError: hunter2 is refused")
    for where in (folder, tmp_path / "empty"):
        end = GroupEnd(failures={1: note}, history=str(where / NAME))
        record_end(end, "failed", Failure(1, 1, "rank 1 has failed"))
        assert RunRecord(where).state == ("failed", "rank 1: ValueError: *** is refused")
