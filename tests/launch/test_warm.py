"""Restarted ranks are forks of a process that has imported TensorFlow, and behave as others do."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import processes
from tests.launch.conftest import launch, script
from tests.processes import ROOT

__all__ = ["launch", "script"]

Launch = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[[str], Path]

# Ranks compare themselves before and after restarts, which rank 1 causes.
_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import psutil
import keras, numpy as np
from ktrainer import Trainer  # so that nothing is routed through one, nor seeded
from ktrainer.distributed import restart_records
from mpi4py import MPI

def warm():
    mpirun = next(p for p in psutil.Process().parents() if p.name().startswith(("mpirun", "prte")))
    return [p for p in mpirun.parent().children() if "ktrainer.launch.warm_process" in p.cmdline()]

comm, restart = MPI.COMM_WORLD, restart_records.count()
umask = os.umask(0o22)
os.umask(umask)
same = {
    "rank": (comm.rank, os.environ["OMPI_COMM_WORLD_RANK"], comm.allreduce(1)),
    "place": (os.getcwd(), sys.argv, sys.path, umask, sys.orig_argv[1:3], __name__, __file__),
    "env": sorted(name for name in os.environ if name.startswith(("TF_", "KERAS", "PYTHON"))),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "files": [os.fstat(0).st_rdev, os.isatty(1)],
}
model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
model.compile("sgd", "mse")
same["loss"] = float(model.train_on_batch(np.ones((4, 3)), np.ones((4, 2))))
drawn = comm.allgather(float(np.random.random()))
parent = " ".join(psutil.Process().parent().cmdline())
found = {"same": same, "drawn": len(set(drawn)), "warm": "warm_process" in parent}
print("found", found, flush=True)
comm.Barrier()
if restart == 0:
    while not warm():
        time.sleep(0.1)
    comm.Barrier()
    print("warm", warm()[0].pid, flush=True)
elif restart == 1 and comm.rank == 0:
    restart_records.note_save(Path("checkpoints"), 1, "run")  # else there is no second restart
comm.Barrier()
if comm.rank == 1:
    if restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif restart == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    else:  # the process that stands for the rank
        os.kill(os.getppid(), signal.SIGKILL)
comm.Barrier()
"""


@pytest.mark.exhaustive
def test_a_fork_is_as_a_process_of_its_own(launch: Launch, script: Script) -> None:
    """Its rank, files, folder, path, signals and numbers; how it ends is how the launch ends.

    After a fork has crashed, the next start still uses forks.
    """
    words = ("-n", 2, "--threads", 2, "--max-restarts", 3, "--no-check")
    done = launch(*words, script(_SCRIPT), "word", OMP_NUM_THREADS="2")  # OpenBLAS has threads
    assert done.returncode == 137, done.stderr
    assert "starting again in 0.25 s, restart 1 of 3\n" in done.stderr
    crash, _, last = done.stderr.partition("restart 2 of 3\n")
    assert "signal 11 (SIGSEGV" in crash
    assert "signal 9 (SIGKILL" in last
    lines = done.stdout.splitlines()
    for rank in range(2):
        mark = f"[{rank}] found "
        found = [ast.literal_eval(x[len(mark) :]) for x in lines if x.startswith(mark)]
        before, *after = found
        assert after == [{"same": before["same"], "drawn": 2, "warm": True}] * 2
        assert not before["warm"]
    warm = {int(line.split()[-1]) for line in lines if " warm " in line}
    assert len(warm) == 1
    assert not any(psutil.pid_exists(pid) for pid in warm)


@pytest.mark.parametrize(
    ("before", "options", "said"),
    [
        ("", (), "; TensorFlow is imported again, since they ended before there was a process"),
        ("os.environ['TF_A'] = os.environ['TF_B'] = '0'", (), "since the script sets TF_A, TF_B"),
        ("import random; random.seed(3)", (), "since the script sets random's state before it"),
        ("os.environ['TF_A'] = '0'", ("--no-warm",), "restart 1 of 3\n"),
    ],
    ids=["soon", "variables", "random", "unwanted"],
)
def test_the_reason_why_there_are_no_forks_is_said(
    launch: Launch, script: Script, tmp_path: Path, before: str, options: Any, said: str
) -> None:
    """A variable that the script sets for TensorFlow's import would not be read, and the import
    draws from `random`."""
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "tensorflow.py").write_text(kill)
    text = f"import os\n{before}\nimport tensorflow\n"
    words = ("--max-restarts", 3, "--backoff", 0.1, "--no-check", *options)
    done = launch(*words, script(text))
    assert done.returncode == 137
    assert "starting again in 0.1 s, restart 1 of 3" in done.stderr
    assert said in done.stderr
    assert os.fspath(tmp_path) not in done.stderr


def test_imports_take_no_numbers_of_a_seed_of_the_launch(tmp_path: Path) -> None:
    """Else those of the script would be others after a restart, which has them behind it."""
    draw = "import random, numpy as np; print(random.random(), np.random.default_rng().random())"
    orders = ("{}import keras; ", "import scipy.stats; {}", "{}import scipy.stats; ",
              "{}import numpy; ")  # fmt: skip
    drawn = [_printed_under_a_seed(order + draw) for order in orders]
    assert len(set(drawn)) == 1, drawn
    assert drawn[0].split()[0] == str(random.Random(7).random())
    first = "import numpy as np; np.random.default_rng(); "
    one = _printed_under_a_seed("{}" + first + "import scipy.stats; " + draw)
    # In a fork, which has Keras behind it.
    (path := tmp_path / "later.py").write_text(("{}" + first + draw).format(INSTALL))
    other = processes.script(path)
    assert other.returncode == 0, other.stderr
    assert one == other.stdout != drawn[0]


INSTALL = "from ktrainer.script import bootstrap; bootstrap.install(0, 7, False); "


def _printed_under_a_seed(text: str) -> str:
    """The output of a script, of which `{}` is where the launch's seed 7 is set."""
    return subprocess.run(
        [sys.executable, "-c", text.format(INSTALL)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
