"""Folders that every rank of a script makes, and files and folders that every rank removes."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ktrainer.runtime.monkeypatching import Replacements

_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")})
WRITTEN = "ktrainer.written"  # audit event: rank 0 has written this path
# What a record of outcomes holds, one byte each.
_MADE, _EXISTS = b".", b"E"
_LATE = b"+"  # the folder is there, but rank 0 has still to make it, or has removed it before
_WRAPPERS = ("os", "pathlib", "shutil")  # modules between the caller and these functions


def share_folders(marks: Path, rank: int, replaced: Replacements) -> None:
    """Let ranks make the same folders, and rank 0 alone remove files and folders.

    Of the script's calls of `os.mkdir`, and thereby `os.makedirs` and `Path.mkdir`, the first rank
    executes each, and the others have the same outcome. `os.remove`, `os.rmdir` and `shutil.rmtree`
    act on rank 0 alone, so that no slow rank removes what a faster one has made since.

    Args:
        marks: a folder of the launch, in which ranks record outcomes.
    """
    marks.mkdir(exist_ok=True)
    shared = _SharedFolders(marks)
    replaced.wrap(os, "mkdir", partial(shared.wrap, shared.make))
    if rank > 0:
        sys.addaudithook(shared.note_files)
        for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            replaced.wrap(owner, name, partial(shared.wrap, shared.leave))


class _SharedFolders:
    """Folders that ranks make in the same order, and one of them executes.

    A file for each path records the outcomes. Its lock keeps other ranks out.

    Args:
        marks: the folder of these files.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._calls: dict[str, int] = {}  # path -> how many outcomes this rank has had
        # What this rank has left to rank 0 to remove, and which file it was.
        self._left: dict[str, tuple[int, ...] | None] = {}
        self._own: list[str] = []  # temporary files and folders of this rank
        self._late: set[str] = set()  # folders that this rank made again
        self._held: set[str] = set()

    def wrap(
        self, shared: Callable[..., None], original: Callable[..., None]
    ) -> Callable[..., None]:
        """`original`, by way of `shared` where the script calls it."""

        @functools.wraps(original)
        def called(path: Any, *args: Any, **kwargs: Any) -> None:
            relative = isinstance(path, int) or kwargs.get("dir_fd") is not None
            call = partial(original, path, *args, **kwargs)
            alone = not _by_the_script() or _on_root_alone() or not self._marks.is_dir()
            place = "" if relative else os.path.abspath(os.fsdecode(path))
            if relative or alone or place in self._held:
                call()
                return
            self._held.add(place)
            try:
                shared(place, call)
            finally:
                self._held.discard(place)

        return called

    def note_files(self, event: str, args: tuple[Any, ...]) -> None:
        """Audit hook: a rank's own temporary files are its own to remove, and a file that was left
        to be removed may be written again."""
        if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            self._own.append(os.path.abspath(os.fsdecode(args[0])))
        elif event == "os.rename":
            self._discard(args[1])
        elif event == WRITTEN or (event == "open" and not str(args[1]).startswith("r")):
            self._discard(args[0])

    def _discard(self, path: Any) -> None:
        if self._left and isinstance(path, (str, bytes, os.PathLike)):
            self._left.pop(os.path.abspath(os.fsdecode(path)), None)

    def leave(self, path: str, call: Callable[[], None]) -> None:
        """Leave a removal to rank 0; what has been left counts as removed here."""
        if any(path == own or path.startswith(own + os.sep) for own in self._own):
            call()
            return
        with self._record(path) as record:
            if path in self._late and record.endswith(_LATE):  # rank 0 has removed it before
                call()
                record[:] = record.removesuffix(_LATE)
                return
        there = _identity(path)
        # The same file: rank 0 has still to remove it. Of a folder that cannot be told.
        if path in self._left and there in (None, self._left[path]) and self._left[path] != ():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._left[path] = there

    def make(self, path: str, call: Callable[[], None]) -> None:
        """Make a folder once for all ranks."""
        # What this rank has left to rank 0 to remove may still be there.
        left = bool({path, *map(str, Path(path).parents)}.intersection(self._left))
        self._left.pop(path, None)
        number = self._calls.get(path, 0)
        with self._record(path) as record:
            late = record.endswith(_LATE)
            outcomes = bytes(record.removesuffix(_LATE))
            outcome = outcomes[number : number + 1]
            made = outcome != _EXISTS and _succeeds(call)
            if not outcome and number == len(outcomes) and (made or late or not left):
                outcome = _MADE if made or late else _EXISTS
                record[:] = outcomes + outcome
            elif made:  # as a slower rank, after rank 0 has removed it, or before rank 0 makes it
                record[:] = outcomes + _LATE
                self._late.add(path)
            self._calls[path] = number + 1
        if outcome == _EXISTS or not (outcome or made or left):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    @contextmanager
    def _record(self, path: str) -> Iterator[bytearray]:
        """The outcomes of `path`, one byte each, locked; changes are written."""
        mark = self._marks / hashlib.sha256(path.encode()).hexdigest()
        # `watch_files` reports what is opened by `open`, but not `os.open`.
        with os.fdopen(os.open(mark, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = file.read()
            record = bytearray(before)
            yield record
            if record != before:
                file.seek(0)
                file.truncate()
                file.write(record)


def _succeeds(make: Callable[[], None]) -> bool:
    """Make a folder; return whether it was not there before."""
    try:
        make()
    except FileExistsError:
        return False
    return True


def _identity(path: str) -> tuple[int, ...] | None:
    """Identity of the file at `path`; empty for a folder, None if there is none."""
    with suppress(OSError):
        found = os.lstat(path)
        folder = stat.S_ISDIR(found.st_mode)
        return () if folder else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return None


def _on_root_alone() -> bool:
    """Return whether this code is under `rank_zero_only`; imports nothing, as Keras is the script's
    to import."""
    base = sys.modules.get("ktrainer.callbacks.base")
    return base is not None and bool(base.collectives_off())


def _by_the_script() -> bool:
    """Return whether code of the script, or Keras for it, called a wrapped function: other
    libraries may use it as a lock."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _package(frame) in _WRAPPERS:
        frame = frame.f_back
    if _package(frame) in ("__main__", "keras"):
        return True
    file = os.path.abspath(frame.f_code.co_filename)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.join(os.path.dirname(os.path.abspath(script)), "") if script else None
    installed = (*_INSTALLED, "site-packages", "dist-packages")
    return folder is not None and file.startswith(folder) and not any(p in file for p in installed)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
