"""Rows 5, 6, 21, 22 and 29: a save that cannot be done, or is not for others."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktrainer.checkpoint.background_writer as saver_module
import ktrainer.checkpoint.format.checkpoint_folder as format_module
from ktrainer import Callback, Trainer, distributed
from ktrainer.checkpoint import read_checkpoint, verify
from ktrainer.errors import CheckpointError, SetupError
from tests.checkpoint.whole import write_checkpoint
from tests.faults.runs import CASES, Case, settings, train
from tests.faults.stages import save_with_fault
from tests.small import build, data

# Row 5


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses larger files, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Fills(Callback):
    """The disk of rank 0 gets full after the first checkpoints."""

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if step == 3 and self.world.is_root:
            second, deadline = self.trainer.checkpoint_dir / "step-00000002", time.monotonic() + 20
            while not second.exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # it is written behind the steps
            self.limit = files_limited_to(1200)  # the file of arrays has more
            self.limit.__enter__()

    def close(self) -> None:
        if hasattr(self, "limit"):
            self.limit.__exit__(None, None, None)
            del self.limit


def fill_the_disk(folder: str, *words: str) -> None:
    case = Case(build, 24, ("trainer.epochs=2", "logging.csv=false", *words), lambda: [Fills()])
    with Trainer(overrides=settings(Path(folder), case), callbacks=case.callbacks()) as trainer:
        trainer.fit(build, data())


def check_the_disk(error: BaseException | None, folder: Path) -> None:
    assert isinstance(error, CheckpointError), error
    assert "File too large" in str(error)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    for name in names:
        assert verify(folder / "checkpoints" / name) == []


def test_row_05_the_disk_is_full(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        fill_the_disk(str(tmp_path / "run"))
    check_the_disk(raised.value, tmp_path / "run")


def test_row_05_on_two_ranks(ranks: Callable[..., Any], tmp_path: Path) -> None:
    words = ("backend=data_parallel",)
    for outcome in ranks(2).outcomes(fill_the_disk, str(tmp_path / "run"), *words):
        check_the_disk(outcome.error, tmp_path / "run")


@pytest.mark.parametrize("replaces", [False, True])
def test_row_05_the_rename_fails(tmp_path: Path, monkeypatch: Any, replaces: bool) -> None:
    """Whatever was there by that name is there again."""
    path, rename = tmp_path / "c", os.rename
    if replaces:
        write_checkpoint(path, {"a": np.ones(3)}, {"n": 1})

    def fails(source: Any, target: Any) -> None:
        if ".tmp-" in Path(source).name:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_checkpoint(path, {"a": np.ones(3)}, {"n": 2})
    assert [found.name for found in tmp_path.iterdir()] == ["c"] * replaces
    assert not replaces or read_checkpoint(path)[1] == {"n": 1}


def no_room_for_a_folder(directory: str) -> None:
    """The folder of the third checkpoint cannot be made, by rank 0."""
    here, begin = distributed.current_world(), saver_module.make_temporary

    def full(path: Path) -> Path:
        if path.name == "step-00000003":
            raise CheckpointError(f"cannot write {path.name}: No space left on device")
        return begin(path)

    saver_module.make_temporary = full if here.is_root else begin
    try:
        train(Path(directory), CASES["callbacks"], "backend=data_parallel")
    finally:
        saver_module.make_temporary = begin


def test_row_05_not_even_a_folder(ranks: Callable[..., Any], tmp_path: Path) -> None:
    for outcome in ranks(2).outcomes(no_room_for_a_folder, str(tmp_path)):
        assert isinstance(outcome.error, CheckpointError), outcome.traceback
        assert "step-00000003: No space left" in str(outcome.error)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]


@pytest.mark.exhaustive
@pytest.mark.quick("1-full-told0")
@pytest.mark.parametrize(
    ("faulty", "fault", "told"),
    [
        (1, "full", ["stage 1 cannot write its part: OSError", "No space left"]),
        (0, "full", ["stage 0 cannot write its part: OSError", "No space left"]),
        (1, "no folder", ["stage 1", "cannot see", "file system that all ranks share"]),
        (1, "own disk", ["arrays-p01", "seen from rank 0", "file system that all ranks share"]),
        (0, "bug", ["RuntimeError: before anybody was heard"]),
    ],
)
def test_row_05_one_stage_cannot_write(
    ranks, tmp_path, faulty: int, fault: str, told: list[str]
) -> None:
    directory = tmp_path / "checkpoints"
    for outcome in ranks(4).outcomes(save_with_fault, str(directory), 2, faulty, fault):
        assert isinstance(outcome.error, CheckpointError), outcome.traceback
        for words in told:
            assert words in str(outcome.error)
    assert [path.name for path in directory.iterdir()] == ["step-00000001"]
    assert verify(directory / "step-00000001") == []


# Row 6


class Steps(Callback):
    def on_step_begin(self, step: int) -> None:
        raise AssertionError("a step was begun")


def read_only(tmp_path: Path) -> Path:
    """A folder in which no user can make anything, nor can root."""
    if os.geteuid() == 0:
        return Path("/sys/kernel")
    (tmp_path / "read only").mkdir(mode=0o500)
    return tmp_path / "read only"


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.dir"])
def test_row_06_a_folder_that_is_read_only(tmp_path: Path, key: str) -> None:
    words = [f"run.dir={tmp_path / 'run'}", "checkpoint.every=1ba", "logging.progress=none"]
    words.append(f"{key}={read_only(tmp_path) / 'below'}")
    with Trainer(overrides=words, callbacks=[Steps()]) as trainer, pytest.raises(SetupError) as e:
        trainer.fit(build, data())
    assert "below" in str(e.value)


# Row 21


def broken(at: str, path: Path) -> None:
    if at == "before rename" and path.name >= "step-00000004":
        raise OSError(5, "Input/output error")


class Counts(Callback):
    """The updates that were done."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("every", ["1ba", "4ba"], ids=["next save", "end"])
def test_row_21_the_background_writer_fails(tmp_path: Path, monkeypatch: Any, every: str) -> None:
    monkeypatch.setattr(format_module, "fault_point", broken)
    counts = Counts()
    case = Case(build, 24, ("trainer.epochs=1", f"checkpoint.every={every}", "checkpoint.keep=2"))
    words = settings(tmp_path / "run", case)
    with (
        Trainer(overrides=words, callbacks=[counts]) as trainer,
        pytest.raises(CheckpointError, match="Input/output error"),
    ):
        trainer.fit(build, data())
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    if every == "1ba":
        assert counts.steps == [1, 2, 3, 4, 5]  # the fourth failed, which the fifth tells
        assert left == ["step-00000002", "step-00000003"], "nothing was pruned"
    else:
        assert counts.steps == [1, 2, 3, 4, 5, 6]
        assert left == []


# Row 22


HOLDS = """
import sys
from pathlib import Path
from ktrainer.runtime.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "run folder")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job(folder: Path) -> Iterator[subprocess.Popen]:
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDS, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("where", ["run", "elsewhere"])
def test_row_22_two_jobs_on_one_folder(tmp_path: Path, where: str) -> None:
    words = [
        f"run.dir={tmp_path / 'run'}",
        f"checkpoint.dir={tmp_path / 'elsewhere'}",
        "checkpoint.every=1ep",
        "logging.progress=none",
    ]
    with another_job(tmp_path / where) as process:
        told = rf"in use .*process {process.pid} on "
        with (
            Trainer(overrides=words, callbacks=[Steps()]) as trainer,
            pytest.raises(SetupError, match=told) as raised,
        ):
            trainer.fit(build, data())
        assert str(tmp_path / where) in str(raised.value)
        assert not (tmp_path / where / "config.yaml").exists()
    with Trainer(overrides=words) as trainer:  # it was killed: nothing stale is in the way
        trainer.fit(build, data())
    assert not list(tmp_path.rglob(".lock"))


def fit_there(folder: str) -> None:
    words = ["backend=data_parallel", f"run.dir={folder}", "logging.progress=none"]
    with Trainer(overrides=words, callbacks=[Steps()]) as trainer:
        trainer.fit(build, data())


def test_row_22_on_two_ranks(ranks: Callable[..., Any], tmp_path: Path) -> None:
    with another_job(tmp_path / "run") as process:
        for outcome in ranks(2).outcomes(fit_there, str(tmp_path / "run")):
            assert isinstance(outcome.error, SetupError), outcome.traceback
            assert f"process {process.pid} on " in str(outcome.error)


# Row 29


def test_row_29_private_even_without_a_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(tmp_path / "runs" / "one", CASES["callbacks"], "trainer.epochs=1")
        write_checkpoint(tmp_path / "new" / "deep" / "c", {"a": np.ones(2)}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "one").stat().st_mode) == 0o700
    for top in (tmp_path / "runs" / "one" / "checkpoints", tmp_path / "new"):
        for path in [top, *top.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
