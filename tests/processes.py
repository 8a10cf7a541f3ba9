"""Run a command, Python or `ktrainer` in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.dist.harness.group import ROOT

Done = subprocess.CompletedProcess[str]


def run(command: Sequence[object], cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """Run a command to its end; its output as text."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def python(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """`run` Python."""
    return run([sys.executable, *words], cwd, seconds, **env)


def ktrainer(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """`run` `ktrainer`."""
    return python("-m", "ktrainer.cli.main", *words, cwd=cwd, seconds=seconds, **env)
