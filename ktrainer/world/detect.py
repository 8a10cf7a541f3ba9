"""Find out how this process was started, and open the world that fits.

| started by | world |
|---|---|
| `mpirun`, `ktrainer launch`, `srun` with PMIx/PMI | `MpiWorld` |
| `horovodrun --gloo` | `HorovodWorld` |
| plain `python` | `SingleWorld` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ktrainer.world.base import SingleWorld, World

_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_SLURM_SIZE = "SLURM_NTASKS"
_SLURM_STEP = "SLURM_STEP_ID"

_current: World | None = None


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """How this process was started: `"mpi"`, `"horovod"` or `"single"`."""
    if any(int(environ.get(key, "0")) > 0 for key in _MPI_SIZE):
        return "mpi"
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        return "horovod"
    if _SLURM_STEP in environ and int(environ.get(_SLURM_SIZE, "1")) > 1:
        return "mpi"
    return "single"


def open_world(deadline: float = 300.0) -> World:
    """The world of this process, opened at the first call.

    Args:
        deadline: seconds that a wait on other ranks may last; a later call changes it.
    """
    global _current
    if _current is None:
        kind = launcher()
        if kind == "mpi":
            from ktrainer.world.mpi import MpiWorld

            _current = MpiWorld()
        elif kind == "horovod":
            from ktrainer.world.horovod import HorovodWorld

            _current = HorovodWorld(deadline)
        else:
            _current = SingleWorld()
    _current.deadline = deadline
    return _current


def current() -> World:
    """The world already open, else the one that `open_world` opens."""
    return _current if _current is not None else open_world()
