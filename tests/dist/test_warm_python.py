"""Scripts and ranks under the tests' warm Python are as they are under Python, but for imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Done, ktrainer, python, script, warm_python

SCRIPT = """
import json, os, signal, sys
ready = "tensorflow" in sys.modules  # before the script imports it
def value(): return os.environ["GIVEN"]
facts = [sys.argv, sys.path[0], __name__, __file__, os.getcwd(), value(), sys.executable,
         type(sys.modules["__main__"].value).__name__, [*map(str, map(signal.getsignal, (2, 15)))]]
print(json.dumps({"facts": facts, "ready": ready}), flush=True)
exec(sys.argv[1])
"""
ENDS = ["sys.exit(7)", "raise ValueError('planned')", "os.kill(os.getpid(), 9)", "pass"]


def found(done: Done) -> Any:
    return json.loads(done.stdout)


@pytest.mark.parametrize("end", ENDS)
def test_a_script(tmp_path: Path, end: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    cold, warm = (run(path, end, cwd=tmp_path, GIVEN="x") for run in (python, script))
    assert (found(warm)["ready"], found(cold)["ready"]) == (True, False)
    assert found(warm)["facts"] == found(cold)["facts"]
    assert warm.returncode == cold.returncode
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_ranks(tmp_path: Path) -> None:
    words = ("script.py", "0", "backend=data_parallel")  # it is asked for as Keras is imported
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ktrainer("run", "-n", 2, "--all-ranks", *words, cwd=tmp_path, GIVEN="x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"ready": true') == 2


def test_what_imports_read_is_read() -> None:
    assert warm_python() != sys.executable
    assert warm_python(TF_CPP_MIN_LOG_LEVEL="0") == sys.executable
    assert warm_python(PYTHONPATH="/somewhere") == sys.executable
    assert warm_python(OTHER="0") == warm_python()


def test_a_killed_script(tmp_path: Path, within: Callable[..., None]) -> None:
    """It does not outlive the process that stands for it."""
    (tmp_path / "script.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    command = [warm_python(), tmp_path / "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        assert process.stdout.read() == ""  # ends once nobody can write to it
    within(5, lambda: not Path(f"/proc/{pid}").exists(), "the end of the script")
