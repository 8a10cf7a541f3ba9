"""Files that the script itself opens for writing, which all ranks then write."""

from __future__ import annotations

import os
import sys
from typing import Any

from ktrainer.script.loops import users_frame

_WRITES = ("w", "a", "x")
_made: set[str] = set()  # temporary files and folders of this process
_told: set[str] = set()


def watch_files(rank: int) -> None:
    """On ranks other than 0, warn once of each file that the script opens for writing."""
    if rank:
        sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, _ = args
        if isinstance(mode, str) and mode.startswith(_WRITES) and isinstance(path, str):
            _opened(os.path.abspath(path))
    elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        _made.add(os.path.abspath(args[0]))


def _opened(path: str) -> None:
    if path in _told or path.startswith(("/dev/", "/proc/", *_made)) or str(os.getpid()) in path:
        return
    if os.path.isdir(path):  # a temporary file without a name
        return
    frame = users_frame(sys._getframe(2))
    if frame is None or not _by_the_script(frame.f_code.co_filename):
        return
    _told.add(path)
    print(
        f"ktrainer run: every rank writes {path} ({frame.f_code.co_filename}, line "
        f"{frame.f_lineno}): let rank 0 alone do it, in a function under @ktrainer.rank_zero_only",
        file=sys.stderr,
        flush=True,
    )


def _by_the_script(file: str) -> bool:
    """Whether a file of code lies beside the script, or below its folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else None
    return folder is not None and os.path.abspath(file).startswith(folder)
