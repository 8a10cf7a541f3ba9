"""The hardware and launch of a process: ranks, cores, GPUs, Horovod."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, Protocol

from ktrainer.config.cluster_environment import tf_config

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/{}"


class HardwareGroup(Protocol):
    """The part of a `World` that facts are gathered through."""

    name: str
    size: int
    local_size: int

    def allgather(self, value: Any, what: str = ...) -> list[Any]:
        """The value of every rank."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The processes and their machine, as a plan needs them.

    Attributes:
        size: processes in all.
        local_size: processes on this node.
        cores: processor cores of this node that the processes may use.
        gpus: GPUs on this node.
        horovod: whether Horovod can be imported.
        horovod_nccl: whether it was built with NCCL.
        own_gpu: whether every process of every node has a GPU of its own; None: tell by `gpus`.
        threads: threads of this process that TF_NUM_INTRAOP_THREADS asks for, if it does.
        world: what connects the processes: `"mpi"`, `"horovod"` or `"single"`.
        workers: workers of a cluster with parameter servers; None: there is no such cluster.
    """

    size: int = 1
    local_size: int = 1
    cores: int = 1
    gpus: int = 0
    horovod: bool = False
    horovod_nccl: bool = False
    own_gpu: bool | None = None
    threads: int | None = None
    world: str = "single"
    workers: int | None = None

    @property
    def gpu_each(self) -> bool:
        """Whether every process has a GPU of its own."""
        return self.gpus >= self.local_size if self.own_gpu is None else self.own_gpu

    @classmethod
    def detect(cls, world: HardwareGroup) -> Hardware:
        """The facts of this process's node, in one all-gather, such that all ranks decide alike.

        TensorFlow is imported only where there are a GPU and Horovod, to ask that for NCCL.
        """
        gpus, cores, horovod = _visible_gpus(), usable_cores(), find_spec("horovod") is not None
        here = socket.gethostname()
        mine = (here, cores, gpus, horovod, bool(gpus) and horovod and _has_nccl())
        everyone = world.allgather(mine, what="facts about the machines")
        hosts = [each[0] for each in everyone]
        # A rank may be bound to some cores, or see some GPUs only: the node has all of them.
        node_gpus = {h: set().union(*(e[2] for e in everyone if e[0] == h)) for h in hosts}
        return cls(
            size=world.size,
            local_size=world.local_size,
            cores=len(set().union(*(each[1] for each in everyone if each[0] == here))),
            gpus=len(node_gpus[here]),
            horovod=all(each[3] for each in everyone),
            horovod_nccl=all(each[4] for each in everyone),
            own_gpu=all(len(node_gpus[h]) >= hosts.count(h) for h in hosts),
            threads=_threads_asked(),
            world=world.name,
            workers=_workers(),
        )


def _workers() -> int | None:
    """The workers in TF_CONFIG, if it names parameter servers."""
    cluster = tf_config()
    return (
        len(cluster.jobs.get("worker", ())) if cluster is not None and cluster.has_servers else None
    )


def _threads_asked() -> int | None:
    """Threads that the user or `ktrainer run` asks TensorFlow for; 0, its default, is None."""
    asked = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_slices(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide processors among ranks: contiguous equal parts of `cpus`.

    Args:
        cpus: processor numbers in topology order, so that a part stays within a socket and hardware
            threads of one core stay together.

    Returns:
        One list for each rank; an empty list when there are fewer processors than ranks, since
        the scheduler then shares them better.
    """
    each = len(cpus) // ranks
    return [list(cpus[i * each : (i + 1) * each]) for i in range(ranks)] if each else []


def available_cpus() -> list[int]:
    """Numbers of the processors that this process may use, ordered by socket, core, thread."""
    if not hasattr(os, "sched_getaffinity"):
        return []

    def place(cpu: int) -> tuple[int, int, int]:
        names = ("physical_package_id", "core_id")
        try:
            package, core = (int(Path(_SIBLINGS.format(cpu, n)).read_text()) for n in names)
        except (OSError, ValueError):
            return (0, 0, cpu)
        return (package, core, cpu)

    return sorted(os.sched_getaffinity(0), key=place)


def tensorflow_has_cuda() -> bool:
    """Return whether the installed TensorFlow is built for CUDA, without importing it."""
    spec = find_spec("tensorflow")
    folders = spec.submodule_search_locations if spec is not None else None
    facts = Path(next(iter(folders or []), "")) / "python" / "platform" / "build_info.py"
    return facts.is_file() and bool(run_path(str(facts))["build_info"]["is_cuda_build"])


def _visible_gpus() -> set[str]:
    """Names of the NVIDIA GPUs that this process may use, without loading CUDA; none for a
    TensorFlow that is built for CPUs."""
    devices = {path.removeprefix("/dev/nvidia") for path in glob("/dev/nvidia[0-9]*")}
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices or not tensorflow_has_cuda():
        return set()
    if asked is None:
        return devices
    return {name.strip() for name in asked.split(",") if name.strip() not in ("", "-1")}


def _has_nccl() -> bool:
    try:
        import horovod.tensorflow as hvd

        return bool(hvd.nccl_built())
    except Exception:  # a Horovod built for another TensorFlow fails in many ways
        return False
