"""Open the world of this process, as the launcher that started it requires.

| started by | world |
|---|---|
| `mpirun`, `ktrainer run`, `srun` with PMIx/PMI | `MpiWorld` |
| `horovodrun --gloo` | `HorovodWorld` |
| anything, with a cluster in TF_CONFIG or Slurm's variables | `ClusterWorld` |
| plain `python` | `SingleWorld` |
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module

from ktrainer.config.cluster_environment import ClusterSpec
from ktrainer.distributed.launcher_events import has_listener, report_startup
from ktrainer.distributed.world import SingleWorld, World
from ktrainer.errors import SetupError

_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_SLURM_SIZE = "SLURM_NTASKS"  # in a step, of that step
_SLURM_STEP = "SLURM_STEP_ID"
_TRANSPORTS = "OMPI_MCA_btl"

_current: World | None = None


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Detect the launcher of this process: `"mpi"`, `"horovod"` or `"single"`."""
    if any(int(environ.get(key, "0")) > 0 for key in _MPI_SIZE):
        return "mpi"
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        return "horovod"
    if _SLURM_STEP in environ and int(environ.get(_SLURM_SIZE, "1")) > 1:
        return "mpi"
    return "single"


def open_world(
    deadline: float = 300.0,
    cluster: ClusterSpec | None = None,
    start_timeout: float = 60.0,
    heal: bool = False,
    start_deadline: float = 1800.0,
) -> World:
    """The world of this process, opened at the first call.

    Args:
        deadline: seconds that a wait on other ranks may last; a later call changes it.
        cluster: the processes to connect to where neither MPI nor Horovod started this one.
        start_timeout: seconds to wait for them.
        heal: survive the loss of ranks and let others join, if MPI connects them.
        start_deadline: seconds to wait until all processes that MPI connects open the world.
    """
    global _current
    if _current is None:
        kind = launcher()
        if cluster is not None and not _started_by_mpi():
            from ktrainer.distributed.cluster_world import ClusterWorld

            _current = ClusterWorld(cluster, start_timeout)
        elif kind == "mpi":
            _current = _open_mpi_world(heal, start_deadline)
        elif kind == "horovod":
            from ktrainer.distributed.horovod_world import HorovodWorld

            _current = HorovodWorld(deadline)
        else:
            _current = SingleWorld()
    _current.deadline = deadline
    return _current


def _open_mpi_world(heal: bool, start_deadline: float) -> World:
    report_startup(start_deadline)  # before MPI, whose start waits for all, and hears no signal
    _start_mpi_with_the_other_ranks(start_deadline)
    if heal:
        from ktrainer.distributed.joining_ranks import open_elastic_world

        return open_elastic_world(start_deadline)
    from ktrainer.distributed.mpi_world import MpiWorld

    world = MpiWorld(start_deadline)
    check_size(world.size)
    return world


def _start_mpi_with_the_other_ranks(start_deadline: float) -> None:
    """Import MPI, which waits for all ranks to do so. `ktrainer run` watches that wait; under a
    plain mpirun only Python's fault handler can: it ends this process with its stack, in which the
    name of this function says what it waited for."""
    alone = not has_listener() and "mpi4py.MPI" not in sys.modules
    if alone:
        with suppress(OverflowError):  # longer than the handler supports
            faulthandler.dump_traceback_later(start_deadline, file=2, exit=True)
    try:
        with _without_ofi_transport():
            import_module("mpi4py.MPI")
    finally:
        if alone:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _without_ofi_transport() -> Iterator[None]:
    """Context in which Open MPI, where all ranks are on one host, starts without its transport
    `ofi`: it looks for networks for a second. `ktrainer run` names the transports itself."""
    ranks, here = (os.environ.get(f"OMPI_COMM_WORLD_{of}SIZE") for of in ("", "LOCAL_"))
    if ranks is None or ranks != here or _TRANSPORTS in os.environ:
        yield
        return
    os.environ[_TRANSPORTS] = "^ofi"
    try:
        yield
    finally:
        del os.environ[_TRANSPORTS]


def _started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MPI connects the processes: `srun` alone does not, without PMI."""
    return launcher(environ) != "single" and any(
        key in environ for key in (*_MPI_SIZE, "PMIX_RANK", "HOROVOD_RANK")
    )


def launched(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """The variable that holds how many processes the launcher started, and that number; None if
    there is none."""
    for key in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(key, "0").isdigit() and int(environ.get(key, "0")) > 0:
            return key, int(environ[key])
    if _SLURM_STEP in environ and environ.get(_SLURM_SIZE, "").isdigit():
        return _SLURM_SIZE, int(environ[_SLURM_SIZE])
    return None


def check_size(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a world of `size` where the launcher started another number of processes: MPI and the
    launcher do not know each other, and each process would train by itself.

    Raises:
        SetupError: on each of them, saying how to start.
    """
    said = launched(environ)
    if said is None or said[1] == size:
        return
    slurm = _SLURM_STEP in environ
    remedy = (
        "Start with `srun --mpi=pmix` (`srun --mpi=list` says what this Slurm has), or with mpirun "
        "inside of the allocation."
        if slurm
        else "Start with `ktrainer run`, or with the mpirun of the MPI that mpi4py uses."
    )
    raise SetupError(
        f"{said[1]} processes were started ({said[0]}), but MPI in this one sees {size}: the "
        f"launcher and the MPI library do not work together. {remedy}"
    )


def barrier() -> None:
    """Wait until all ranks have called it; returns at once in one process."""
    current_world().barrier()


def is_open() -> bool:
    """Return whether a Trainer, or a function that waits for all ranks, has opened the world."""
    return _current is not None


def current_world() -> World:
    """The world already open, else the one that `open_world` opens."""
    return _current if _current is not None else open_world()
