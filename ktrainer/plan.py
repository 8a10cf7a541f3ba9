"""The plan of a run: what will happen, and everything that makes it impossible.

Pure: a configuration and facts about the machine give a plan that can be printed, or a
`ConfigError`, before anything is started.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from typing import Any, Protocol

from ktrainer.config import Config, DataParallelConfig, PipelineConfig
from ktrainer.errors import ConfigError


class Group(Protocol):
    """The part of a `World` that facts are gathered through."""

    name: str
    size: int
    local_size: int

    def allgather(self, value: Any, what: str = ...) -> list[Any]:
        """The value of every rank."""


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What a plan has to know about the processes and their machine.

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

    @property
    def gpu_each(self) -> bool:
        """Whether every process has a GPU of its own."""
        return self.gpus >= self.local_size if self.own_gpu is None else self.own_gpu

    @classmethod
    def detect(cls, world: Group) -> WorldFacts:
        """The facts of this process's node, in one all-gather, such that all ranks decide alike.

        TensorFlow is imported only where there are a GPU and Horovod, to ask that for NCCL.
        """
        gpus, cores, horovod = _visible_gpus(), _usable_cores(), find_spec("horovod") is not None
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
        )


def _threads_asked() -> int | None:
    """What the user, or `ktrainer launch`, asks TensorFlow for; its default, 0, is no number."""
    asked = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _usable_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _visible_gpus() -> set[str]:
    """Names of the NVIDIA GPUs that this process may use, without loading CUDA."""
    devices = {path.removeprefix("/dev/nvidia") for path in glob("/dev/nvidia[0-9]*")}
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices or asked is None:
        return devices
    return {name.strip() for name in asked.split(",") if name.strip() not in ("", "-1")}


def _has_nccl() -> bool:
    try:
        import horovod.tensorflow as hvd

        return bool(hvd.nccl_built())
    except Exception:  # a Horovod built for another TensorFlow fails in many ways
        return False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do; `print(plan)` says it in words.

    Attributes:
        backend: name of the backend.
        engine: what carries gradients: `"mpi"`, `"horovod"`, or None when nothing does.
        size: processes in all.
        threads: threads of each process.
        device: `"gpu"` or `"cpu"`.
        rank_batches: examples of a full batch that each replica trains on, by replica; for arrays.
            A replica is one rank, but for a pipeline, whose replicas are `partitions` ranks each.
        global_batch: examples of one update, `accumulate` batches together; for arrays.
        notes: what is allowed, but may not be what is meant.
        partitions: processes that hold one copy of the model together.
        layout: the pipeline in words, if there is one.
    """

    backend: str
    engine: str | None
    size: int
    threads: int
    device: str
    rank_batches: tuple[int, ...]
    global_batch: int
    notes: tuple[str, ...] = ()
    partitions: int = 1
    layout: str | None = None

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which trains on a share of the data."""
        return self.size // self.partitions

    def __str__(self) -> str:
        processes = "1 process" if self.size == 1 else f"{self.size} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        least, most = min(self.rank_batches), max(self.rank_batches)
        per_rank = str(most) if least == most else f"{least} to {most}"
        lines = [
            f"backend   {self.backend}" + (f", engine {self.engine}" if self.engine else ""),
            f"processes {processes} on {self.device}, {threads} each",
            f"batch     {self.global_batch} examples an update, {per_rank} a "
            f"{'replica' if self.layout else 'rank'} and step",
        ]
        if self.layout:
            lines.insert(1, f"pipeline  {self.layout}")
        return "\n".join(lines + [f"note      {note}" for note in self.notes])


def make_plan(config: Config, facts: WorldFacts) -> Plan:
    """The plan for a configuration on a machine.

    Raises:
        ConfigError: if it cannot run, with what to change.
    """
    _check_backend(config, facts)
    pipeline = config.backend if isinstance(config.backend, PipelineConfig) else None
    partitions = pipeline.partitions if pipeline else 1
    replicas, batch = facts.size // partitions, config.data.batch_size
    engine = _engine(config, facts, replicas)
    if config.data.batch == "per_worker":
        rank_batches = (batch,) * replicas
    else:
        base, extra = divmod(batch, replicas)
        rank_batches = tuple(base + (rank < extra) for rank in range(replicas))
    return Plan(
        backend=config.backend.name,
        engine=engine,
        size=facts.size,
        threads=config.world.threads or facts.threads or _fair_threads(facts),
        device="gpu" if facts.gpus else "cpu",
        rank_batches=rank_batches,
        global_batch=sum(rank_batches) * config.trainer.accumulate,
        notes=(*_notes(config, facts, replicas, engine), *_pipeline_notes(config, rank_batches)),
        partitions=partitions,
        layout=_layout(pipeline, replicas) if pipeline else None,
    )


def _check_backend(config: Config, facts: WorldFacts) -> None:
    name = config.backend.name
    if name == "tf_distribute":
        message = f"{name} is not part of this version: use local, data_parallel or pipeline."
        raise ConfigError(message, path="backend", value=name)
    if name == "local" and facts.size > 1:
        message = (
            f"local is one process, but {facts.size} were started: set backend=data_parallel, "
        )
        message += "or start one."
        raise ConfigError(message, path="backend", value=name)
    if isinstance(config.backend, PipelineConfig):
        _check_partitions(config.backend.partitions, facts.size)


def _check_partitions(partitions: int, size: int) -> None:
    """The processes must be whole pipelines."""
    if size % partitions == 0:
        return
    below, above = size - size % partitions, size - size % partitions + partitions
    starts = [f"`ktrainer launch -n {n}`" for n in (below, above) if n]
    near = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - partitions))
    are = "1 process is" if size == 1 else f"{size} processes are"
    raise ConfigError(
        f"{are} no multiple of {partitions} partitions: start with "
        f"{' or '.join(starts)}, or set backend.partitions={near}.",
        path="backend.partitions",
        value=partitions,
    )


def _layout(backend: PipelineConfig, replicas: int) -> str:
    """The pipeline in words."""
    stages = f"{backend.partitions} partitions"
    if backend.chunks > 1:
        stages += f" of {backend.chunks} stages each"
    copies = "1 replica" if replicas == 1 else f"{replicas} replicas ({backend.placement})"
    parts = f"{backend.microbatches} microbatch{'es' if backend.microbatches > 1 else ''}"
    return f"{stages} x {copies}, {backend.schedule} with {parts}"


def _engine(config: Config, facts: WorldFacts, replicas: int) -> str | None:
    """The engine that `auto` stands for, or the chosen one if it can run."""
    backend = config.backend
    if isinstance(backend, PipelineConfig):
        if replicas == 1:
            return None  # nothing to sum over
    elif not isinstance(backend, DataParallelConfig):
        return None
    if backend.engine == "auto" and facts.world == "horovod":
        return "horovod"  # `horovodrun` without MPI: nothing else connects these processes
    if backend.engine == "auto":
        return "horovod" if facts.gpus and facts.horovod_nccl and facts.gpu_each else "mpi"
    if backend.engine == "horovod" and not facts.horovod:
        raise ConfigError(
            "Horovod is not installed: run `ktrainer horovod build`, or set backend.engine=mpi.",
            path="backend.engine",
            value="horovod",
        )
    if backend.engine == "horovod" and facts.horovod_nccl and facts.gpus and not facts.gpu_each:
        raise ConfigError(
            f"{facts.local_size} processes share {facts.gpus} GPU(s) on this node, and NCCL needs "
            "one for each: start fewer, or set backend.engine=mpi.",
            path="backend.engine",
            value="horovod",
        )
    return backend.engine


def _fair_threads(facts: WorldFacts) -> int:
    return max(1, facts.cores // max(1, facts.local_size))


def _notes(config: Config, facts: WorldFacts, replicas: int, engine: str | None) -> list[str]:
    """Settings that can run, but that are likely to surprise."""
    notes, data = [], config.data
    copies = "replicas" if config.backend.name == "pipeline" else "processes"
    if data.batch == "global" and data.batch_size < replicas:
        notes.append(
            f"data.batch_size={data.batch_size} is less than {replicas} {copies}: "
            "some have nothing to train on."
        )
    if config.lr.scale != "none" and data.batch == "global" and replicas > 1:
        notes.append(
            f"lr.scale={config.lr.scale} with data.batch=global: the batch does not grow with "
            f"the number of {copies}, so results will depend on it."
        )
    if 0 < facts.gpus < facts.local_size:
        notes.append(f"{facts.local_size} processes share {facts.gpus} GPU(s) on this node.")
    if facts.cores < facts.local_size:
        notes.append(f"{facts.local_size} processes share {facts.cores} core(s) on this node.")
    if config.trainer.precision == "mixed_float16" and not facts.gpus:
        notes.append("mixed_float16 is slow on CPUs; mixed_bfloat16 or float32 is faster.")
    if isinstance(config.backend, DataParallelConfig) and config.backend.op == "sum":
        notes.append(f"backend.op=sum: gradients are {facts.size} times their average.")
    if engine == "mpi" and facts.gpus and facts.size > 1:
        notes.append(
            "gradients go through host memory; `ktrainer horovod build` gives Horovod with NCCL."
        )
    return notes


def _pipeline_notes(config: Config, batches: tuple[int, ...]) -> list[str]:
    """What slows a pipeline down."""
    backend, notes = config.backend, list[str]()
    if not isinstance(backend, PipelineConfig):
        return notes
    if min(batches) < backend.microbatches:
        notes.append(
            f"a replica's batch of {min(batches)} examples is less than "
            f"backend.microbatches={backend.microbatches}: it is cut into so many as it has."
        )
    if backend.microbatches < backend.partitions:
        notes.append(
            f"backend.microbatches={backend.microbatches} is less than {backend.partitions} "
            f"partitions: most of the time they wait for one another; {4 * backend.partitions} "
            "is a good start."
        )
    return notes
