"""Run a command, Python or `ktrainer` in a process of its own, as a user does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.dist.harness.group import ROOT
from tests.dist.harness.warm_python import WarmPython

if TYPE_CHECKING:
    from tests.dist.harness.hosts import Hosts

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


def script(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """`run` a Python script, which need not import TensorFlow."""
    return run([warm_python(**env), *words], cwd, seconds, **env)


def ktrainer(*words: object, cwd: Path = ROOT, seconds: float = 240.0, **env: str) -> Done:
    """`run` `ktrainer`, whose ranks need not import TensorFlow."""
    command = [warm_python(**env), "-m", "ktrainer.cli.main", *words]
    return run(command, cwd, seconds, **env)


def warm_python(**env: str) -> str:
    """A Python for commands: scripts, and ranks under `ktrainer run`, need not import TensorFlow.

    It is the usual one, which imports, where `env` has other values of what imports read.
    """
    return _warm_python().executable(_read_by_imports(env))


def warm_python_on(made: Hosts, **env: str) -> str:
    """`warm_python` for commands on these hosts, until they are killed."""
    return _warm_python().executable_on(made, _read_by_imports(env))


def end_warm_python() -> None:
    """End the process that commands of `warm_python` are forks of."""
    if _warm_python.cache_info().currsize:
        _warm_python().close()
        _warm_python.cache_clear()


def _read_by_imports(env: dict[str, str]) -> dict[str, str]:
    """The environment without what only the start of a cluster reads."""
    return {**os.environ, **{name: env[name] for name in env if name != "TF_CONFIG"}}


@functools.cache
def _warm_python() -> WarmPython:
    return WarmPython()
