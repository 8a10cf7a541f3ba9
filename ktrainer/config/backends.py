"""The backends' keys: one dataclass for each, and one line in `BACKENDS`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from ktrainer.config.bounds import number


@dataclass(frozen=True)
class BackendConfig:
    """How a step runs.

    Attributes:
        name: which backend; `backend=NAME` sets it with that backend's defaults.
    """

    name: str = MISSING


@dataclass(frozen=True)
class LocalConfig(BackendConfig):
    """One process: the plain reference that every other backend equals.

    Attributes:
        name: local.
    """

    name: str = "local"


@dataclass(frozen=True)
class DataParallelConfig(BackendConfig):
    """One process for each device, each with the whole model and its share of the data.

    Attributes:
        name: data_parallel.
        engine: what carries gradients between processes. mpi: fused buckets through MPI, needs
            nothing compiled. horovod: Horovod's all-reduce, NCCL on GPUs. auto: horovod where
            there is a GPU and Horovod has NCCL, else mpi.
        compression: none, or fp16: gradients travel in half precision (fewer bytes, rounded).
        op: average: the gradient of the mean loss. sum: that of the sum over processes.
        bucket_mb: size of the fused messages in MiB, for the mpi engine.
        sparse_as_dense: send the gradients of embeddings as dense tensors; better when most
            rows are touched.
    """

    name: str = "data_parallel"
    engine: Literal["auto", "horovod", "mpi"] = "auto"
    compression: Literal["none", "fp16"] = "none"
    op: Literal["average", "sum"] = "average"
    bucket_mb: float = number(25.0, above=0)
    sparse_as_dense: bool = False


@dataclass(frozen=True)
class PipelineConfig(BackendConfig):
    """The model cut into stages, one process for each; with more processes, several copies of it.

    Attributes:
        name: pipeline.
        partitions: processes that hold one copy of the model together. The number of processes is
            a multiple of it; the quotient is the number of copies (replicas), which share the
            data as under data_parallel.
        microbatches: parts that a replica's batch is cut into, to keep the stages busy; 4 for
            each partition is a good start. 1: the stages work one after another.
        schedule: the order of forward and backward passes. 1f1b: as fast as gpipe, with fewer
            activations in memory. gpipe: all forward passes first. interleaved: several stages a
            process, see chunks, for shorter waits and more messages. zero_bubble: gradients of
            weights fill the waits.
        chunks: stages in each process; more than 1 with schedule=interleaved only.
        active_microbatches: the most microbatches that a process keeps activations of. null: as
            many as the schedule is fastest with.
        costs: what the automatic partition weighs layers by. flops: operations, counted. profile:
            seconds, measured at the start. parameters: their number. uniform: all alike.
        optimize: what the automatic partition balances most: speed or memory.
        memory_weight: 0 balances time alone, 1 memory alone. null: 0.2 for optimize=speed, 0.8
            for optimize=memory.
        memory_limit: the most that a stage may take (weights, gradients, optimizer slots, and
            activations in flight), in bytes, or with a unit, such as "2GB" or "1.5GiB". null: no
            limit.
        stages: stages by hand, as {0: "embed|block_[0-5]", 1: "block_[6-9]|head"}: a regular
            expression for each stage, of whole names of layers. Empty: as
            `with ktrainer.partition(i):` in the model's code says, or automatic without.
        default_partition: the stage of layers that neither stages nor a partition scope names.
            null: refused with stages, 0 with scopes.
        placement: 4 processes and 2 partitions are the replicas (0, 1), (2, 3) with cluster, and
            (0, 2), (1, 3) with spread.
        recompute: compute activations again in the backward pass in place of keeping them: less
            memory for about a third more time.
        engine: what carries gradients between replicas: mpi, horovod or auto, as for
            data_parallel. What goes between stages always goes through MPI.
        compression: none, or fp16: gradients between replicas travel in half precision.
    """

    name: str = "pipeline"
    partitions: int = number(MISSING, at_least=1)
    microbatches: int = number(1, at_least=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    chunks: int = number(1, at_least=1)
    active_microbatches: int | None = number(None, at_least=1)
    costs: Literal["flops", "profile", "parameters", "uniform"] = "flops"
    optimize: Literal["speed", "memory"] = "speed"
    memory_weight: float | None = number(None, at_least=0, at_most=1)
    memory_limit: str | None = None
    stages: dict[str, str] = field(default_factory=dict)
    default_partition: int | None = number(None, at_least=0)
    placement: Literal["cluster", "spread"] = "cluster"
    recompute: bool = False
    engine: Literal["auto", "horovod", "mpi"] = "auto"
    compression: Literal["none", "fp16"] = "none"


@dataclass(frozen=True)
class TfDistributeConfig(BackendConfig):
    """TensorFlow's own strategies. Not part of this version.

    Attributes:
        name: tf_distribute.
        strategy: which tf.distribute strategy.
        devices: list of devices, or their number. null: all.
    """

    name: str = "tf_distribute"
    strategy: Literal[
        "default",
        "one_device",
        "mirrored",
        "multi_worker_mirrored",
        "central_storage",
        "parameter_server",
        "tpu",
    ] = "default"
    devices: Any = None


BACKENDS: dict[str, type[BackendConfig]] = {
    "local": LocalConfig,
    "data_parallel": DataParallelConfig,
    "pipeline": PipelineConfig,
    "tf_distribute": TfDistributeConfig,
}

# What people call a backend elsewhere, and what to write here.
ALIASES = {
    "horovod": "backend=data_parallel backend.engine=horovod",
    "mpi": "backend=data_parallel backend.engine=mpi",
    "ddp": "backend=data_parallel",
    "dp": "backend=data_parallel",
    "single": "backend=local",
    "smp": "backend=pipeline backend.partitions=2",
    "mirrored": "backend=tf_distribute backend.strategy=mirrored",
    "multi_worker_mirrored": "backend=tf_distribute backend.strategy=multi_worker_mirrored",
    "parameter_server": "backend=tf_distribute backend.strategy=parameter_server",
}

# The same for the values of a key.
VALUE_ALIASES = {
    "backend.schedule": {"simple": "gpipe", "dapple": "1f1b", "zb_h1": "zero_bubble"},
}
