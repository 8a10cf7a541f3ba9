"""A relay's connection with the launcher: frames on standard output, messages on standard input.

Both tell each other every `BEAT_SECONDS` that they live.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from pathlib import Path
from typing import IO, Any

BEAT_SECONDS = 0.5
SILENT_SECONDS = 6.0
CHUNK = 1 << 16


class LauncherLostError(Exception):
    """The launcher has ended, or cannot be reached."""


class LauncherConnection:
    """The connection of this host's relay.

    Args:
        ends_by_silence: whether the launcher is lost when nothing was heard from it for
            `SILENT_SECONDS`; else only when the connection is closed.

    Attributes:
        asked_to_end: whether the launcher wants the end.
    """

    def __init__(self, ends_by_silence: bool) -> None:
        self._ends_by_silence = ends_by_silence
        self._input, self.asked_to_end = b"", False
        self._heard = self._last_beat = time.monotonic()
        self._log: IO[bytes] | None = None
        os.set_blocking(1, False)

    @property
    def is_lost(self) -> bool:
        """Whether `lose` was called."""
        return self._log is not None

    def beat(self) -> None:
        """Tell the launcher that this relay lives, and check that the launcher does.

        Raises:
            LauncherLostError: nothing was heard from it for long.
        """
        now = time.monotonic()
        if now - self._last_beat > 3 * BEAT_SECONDS:  # this host was stopped, or is loaded
            self._heard = max(self._heard, now - SILENT_SECONDS / 2)
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self.send("alive", -1, b"")
        self._check_heard()

    def _check_heard(self) -> None:
        if self._ends_by_silence and time.monotonic() - self._heard > SILENT_SECONDS:
            raise LauncherLostError(f"nothing was heard from it for {SILENT_SECONDS:g} s")

    def send(self, kind: str, rank: int, data: bytes) -> None:
        """Send a frame to the launcher; once that is lost, keep what ranks print.

        Raises:
            LauncherLostError: the connection was closed, or nothing was heard for long.
        """
        if self._log is not None:
            if kind in ("out", "err"):
                with contextlib.suppress(OSError):
                    self._log.write(data)
            return
        frame = b"frame %s %d %d\n" % (kind.encode(), rank, len(data)) + data
        while frame:
            try:
                frame = frame[os.write(1, frame) :]
            except BlockingIOError:  # its user may have paused the output
                heard = [] if self.asked_to_end else [0]
                if select.select(heard, [1], [], SILENT_SECONDS)[0]:
                    self._read()
                elif not self.asked_to_end:
                    self._check_heard()
            except OSError as error:
                raise LauncherLostError(f"the connection was closed ({error.strerror})") from error

    def receive(self) -> list[dict[str, Any]]:
        """Read standard input, which has data; return the messages that are complete."""
        self._read()
        *lines, self._input = self._input.split(b"\n")
        return [json.loads(line) for line in lines]

    def _read(self) -> None:
        data = os.read(0, CHUNK)
        self._heard = time.monotonic()
        if not data and not self.asked_to_end:
            raise LauncherLostError("the connection was closed")
        self._input += data
        self.asked_to_end |= b'{"end"' in self._input

    def lose(self, folder: Path) -> None:
        """Send nothing more: what follows is written into the file `lost_launcher_path(folder)`."""
        self._log = _open_log(lost_launcher_path(folder))

    def log(self, text: str) -> None:
        """Write a line about the end of the ranks, after the launcher was lost."""
        assert self._log is not None
        with contextlib.suppress(OSError):
            self._log.write(f"ktrainer run: {text}\n".encode())


def lost_launcher_path(folder: Path) -> Path:
    """The file of a host which says why its ranks ended, after it has lost the launcher.

    Args:
        folder: the host's, which is removed then.
    """
    return folder.with_name(f"{folder.name}-lost-launcher.log")


def _open_log(path: Path) -> IO[bytes]:
    """Open a new file for the owner alone; where that fails, one that takes nothing."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        number = os.open(os.devnull, os.O_WRONLY)
    return open(number, "wb", buffering=0)
