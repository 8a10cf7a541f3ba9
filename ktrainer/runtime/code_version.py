"""The version of a script's code, by git."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

_SECONDS = 5.0  # a large working tree on a slow disk: then it is not known


@cache
def code_version(script: Path) -> dict[str, str]:
    """The `commit` of the working tree that `script` is in, and a digest of the `changes` since;
    empty outside of git, without the latter where there are none."""
    commit = _git(script.resolve().parent, "rev-parse", "HEAD")
    changes = uncommitted_changes(script)
    if not commit or changes is None:
        return {}
    found = {"commit": commit.decode().strip()}
    if changes:
        found["changes"] = hashlib.blake2b(changes, digest_size=6).hexdigest()
    return found


def uncommitted_changes(script: Path) -> bytes | None:
    """The diff of the working tree that `script` is in from its commit; None if git cannot tell."""
    folder = script.resolve().parent
    return _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD")


def _git(folder: Path, *words: str) -> bytes | None:
    """The output of git; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
