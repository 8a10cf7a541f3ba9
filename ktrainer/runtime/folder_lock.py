"""One job at a time in a folder, by a lock file that the kernel releases when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ktrainer.errors import SetupError

NAME = ".lock"
RETRY_SECONDS = 0.2  # for a lock file that its last holder removes between our open and our lock
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class FolderLock:
    """Holds `folder` for this process until `release`; the same process may hold it again.

    A file system without locks is used without one: a marker file instead would outlive a killed
    process, and keep the run from resuming.

    Args:
        folder: an existing folder.
        what: its name in the error message: `"run folder"`.
        seconds: to wait for another process that holds it.

    Raises:
        SetupError: another process holds it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, what: str, seconds: float = RETRY_SECONDS) -> None:
        self._lock: FileLock | None = None
        path = Path(os.path.realpath(folder, strict=True)) / NAME
        lock = FileLock(
            path,
            poll_interval=0.02,
            mode=0o600,
            thread_local=False,
            is_singleton=True,
            fallback_to_soft=False,
        )
        try:
            lock.acquire(timeout=seconds)
        except Timeout:
            raise SetupError(_refusal(path, what)) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return
        self._lock = lock
        path.write_text(_holder())

    def release(self) -> None:
        """Release the folder. May be called twice."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if lock.lock_counter == 1:
            with suppress(OSError):  # the folder may be gone
                os.unlink(lock.lock_file)  # while it is held, so that it is never another job's
        lock.release()

    def __del__(self) -> None:
        self.release()


def seconds_after_loss(deadline: float) -> float:
    """How long a new rank 0 waits for a folder: the lost rank holds it until the system has ended
    its process, or ended its lease on a network file system. The other ranks wait up to `deadline`
    meanwhile, while it takes two folders."""
    return deadline / 3


def is_held(folder: Path) -> bool | None:
    """Whether a process holds `folder`; None where the file system has no locks, or the lock file
    cannot be read.

    On another host, the answer is right where the file system's locks reach across hosts.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}"


def _refusal(path: Path, what: str) -> str:
    holder = "another process"
    with suppress(OSError):
        holder = path.read_text(errors="replace")[:200].strip() or holder
    return (
        f"the {what} {path.parent} is in use by another job ({holder}), and two would overwrite "
        "each other's files. End that one, or give this one a folder of its own: run.dir=PATH, and "
        "checkpoint.dir where it is set."
    )
