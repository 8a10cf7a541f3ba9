"""One job at a time in a folder.

The lock is the kernel's (`flock` on a file `.lock` in the folder): it ends with the process,
however that ends, so nobody ever has to remove a stale one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ktrainer.errors import SetupError

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)

_held: dict[str, tuple[int, int]] = {}  # folder -> descriptor, how often this process holds it


class FolderLock:
    """Holds `folder` for this process until `release`; the same process may hold it again.

    Args:
        folder: must be there.
        what: what it is, for the error message: `"run folder"`.

    Raises:
        SetupError: another process holds it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._key: str | None = None
        key = os.path.realpath(folder)
        descriptor, count = _held.get(key, (-1, 0))
        if not count:
            descriptor = _lock(Path(key), what)
        _held[key] = descriptor, count + 1
        self._key = key

    def release(self) -> None:
        """Let others have it. May be called twice."""
        key, self._key = self._key, None
        if key is None:
            return
        descriptor, count = _held.pop(key)
        if count > 1:
            _held[key] = descriptor, count - 1
            return
        with suppress(OSError):  # the folder may be gone
            os.unlink(os.path.join(key, NAME))  # while it is held: nobody else's is removed
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _lock(folder: Path, what: str) -> int:
    """A descriptor of the locked file."""
    path = folder / NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _take(descriptor):
                raise SetupError(_refusal(folder, what, os.pread(descriptor, 200, 0)))
            if _still_there(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _who().encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has just removed it: once more


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise  # a file system without locks: as before there were any
    return True


def _still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"


def _refusal(folder: Path, what: str, who: bytes) -> str:
    holder = who.decode(errors="replace").strip() or "another process"
    return (
        f"the {what} {folder} is in use by another job ({holder}), and two would overwrite each "
        "other's files. End that one, or give this one a folder of its own: run.dir=PATH, and "
        "checkpoint.dir where it is set."
    )
