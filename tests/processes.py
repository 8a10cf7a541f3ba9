"""Run Python, or `ktrainer`, in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.dist.harness.group import ROOT

Done = subprocess.CompletedProcess[str]


def python(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """Run `python` to its end; its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def ktrainer(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """Run `ktrainer` to its end; its output as text."""
    return python("-m", "ktrainer.cli.main", *words, cwd=cwd, seconds=seconds, **env)
