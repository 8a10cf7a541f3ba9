"""Scripts and ranks under the tests' warm Python are as they are under Python, but for imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness.hosts import Hosts
from tests.processes import ROOT, Done, ktrainer, python, script, warm_python, warm_python_on

SCRIPT = """
import json, os, signal, sys
ready = "tensorflow" in sys.modules  # before the script imports it
def value(): return os.environ["GIVEN"]
facts = [sys.argv, sys.path[0], __name__, __file__, os.getcwd(), value(), sys.executable,
         value.__code__.co_filename, type(sys.modules["__main__"].value).__name__,
         [*map(str, map(signal.getsignal, (2, 15)))]]
print(json.dumps({"facts": facts, "ready": ready}), flush=True)
exec(sys.argv[1])
"""
ENDS = ["sys.exit(7)", "raise ValueError('planned')", "os.kill(os.getpid(), 9)", "pass"]


def found(done: Done) -> Any:
    return json.loads(done.stdout)


@pytest.mark.parametrize("end", ENDS)
def test_a_script(tmp_path: Path, end: str) -> None:
    name = "script.py"  # in the working folder
    (tmp_path / name).write_text(SCRIPT)
    cold, warm = (run(name, end, cwd=tmp_path, GIVEN="x") for run in (python, script))
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


ON_HOST = """
import json, os, platform, socket, sys, tempfile
ready = "tensorflow" in sys.modules
spaces = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")}
facts = [platform.node(), socket.gethostbyname(socket.gethostname()), tempfile.gettempdir(),
         os.listdir("/dev/shm"), spaces, os.readlink("/proc/self") == str(os.getpid())]
print(json.dumps({"facts": facts, "ready": ready}), flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("agent", [False, True], ids=["started", "agent"])
def test_on_a_host(hosts: Callable[[int], Hosts], tmp_path: Path, agent: bool) -> None:
    """Its name, address, folders and process numbers, also under the agent; it ends with it."""
    made = hosts(2)
    warm = warm_python_on(made)
    path = tmp_path / "script.py"
    path.write_text(ON_HOST)

    def run_on_host(program: str) -> Any:
        words = [program, str(path)]
        if agent:
            words = [str(made.agent), made.names[1], f"PYTHONPATH={ROOT}", *words]
        done = made.run(0 if agent else 1, *words, env={"PYTHONPATH": str(ROOT)})
        return found(done)

    fork, own = run_on_host(warm), run_on_host(sys.executable)
    assert (fork["ready"], own["ready"]) == (True, False)
    assert fork["facts"] == own["facts"]
    path.write_text("import time; print(__name__, flush=True); time.sleep(60)")
    process = made.start(1, warm, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "__main__\n"
    made.kill(1)
    assert process.wait(5) != 0
    assert not made.pids(1)


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
