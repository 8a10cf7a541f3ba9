"""Run `ktrainer run` as a user does: in a process of its own, on a script in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.harness.group import ROOT
from tests.processes import warm_python

SECONDS = 60.0


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """`script(text)` is a file in a folder of its own."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def launch_command(*words: object, python: str = sys.executable) -> list[str]:
    """The command line of `ktrainer run`, all ranks shown."""
    return [python, "-m", "ktrainer.cli.main", "launch", "--all-ranks", *map(str, words)]


@pytest.fixture
def launch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`launch("-n", 2, path)` runs to the end, its output captured as text; with `warm`, ranks
    need not import TensorFlow."""

    def start(*words: object, warm: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            launch_command(*words, python=warm_python(**env) if warm else sys.executable),
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    return start
