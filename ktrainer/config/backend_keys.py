"""Keys of the backends: one dataclass for each, and one line in `BACKENDS`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from ktrainer.config.schema_fields import number


@dataclass(frozen=True)
class BackendConfig:
    """How a step runs.

    Attributes:
        name: name of the backend; `backend=NAME` sets it. Keys that were set for another backend
            are dropped.
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
    """One process per device, each with the whole model and its slice of the data.

    Attributes:
        name: data_parallel.
        engine: all-reduce of gradients. mpi: sums through MPI, needs nothing compiled.
            horovod: Horovod's all-reduce, NCCL on GPUs. auto: horovod where each process has a
            GPU and Horovod has NCCL, or under `horovodrun --gloo`; else, and with --heal, mpi.
        compression: none, or fp16 or bf16: gradients are sent in 16 bits (half of the bytes,
            rounded) and added up in float32; bf16 keeps the range of float32. Where sums are
            hierarchical that is between hosts only, and within a host nothing is rounded.
            powersgd: matrices are sent as products of two thin ones (far fewer bytes, and other
            numbers than without); what an update leaves out is sent by the next ones.
        powersgd_rank: rank of these products. The higher, the more bytes, and the closer to the
            gradient.
        hierarchical: sum gradients within each host first and send one sum per host between hosts.
            null: yes, if some of several hosts have several processes, with the mpi engine. false:
            never. true: ask Horovod for it too, which only does so with NCCL.
        op: average: the gradient of the mean loss. sum: that of the sum over processes.
        bucket_mb: largest bucket of gradients that are summed at once, in MiB, for the mpi engine.
            null: 25 on one host; between hosts 1 to 25, by the measured latency and bandwidth of
            the slowest link, with a first bucket of 1. It stays 25 beyond 64 hosts, or 64 processes
            on a host (with hierarchical=false beyond 64 processes in all).
        sparse_as_dense: send the gradients of embeddings as dense tensors; better when a batch
            uses most of the rows.
        local_layers: layers that stay each process's own, as regular expressions that match whole
            names, such as [head, "decoder/block_[0-5]"]: their variables are neither broadcast nor
            reduced, and a checkpoint has those of every process. Such a run depends on the number
            of processes.
    """

    name: str = "data_parallel"
    engine: Literal["auto", "horovod", "mpi"] = "auto"
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: int = number(4, at_least=1)
    hierarchical: bool | None = None
    op: Literal["average", "sum"] = "average"
    bucket_mb: float | None = number(None, above=0)
    sparse_as_dense: bool = False
    local_layers: list[str] = field(default_factory=list)

    @property
    def wire(self) -> str:
        """The type in which floats are sent: none, fp16 or bf16."""
        return "none" if self.compression == "powersgd" else self.compression

    @property
    def low_rank(self) -> int | None:
        """The rank of the matrices that PowerSGD sends; None without it."""
        return self.powersgd_rank if self.compression == "powersgd" else None


@dataclass(frozen=True)
class PipelineConfig(BackendConfig):
    """The model cut into stages, one process per stage; with more processes, several replicas.

    Attributes:
        name: pipeline.
        partitions: processes that hold one copy of the model together. The number of processes is
            a multiple of it; the quotient is the number of replicas, which split the data as under
            data_parallel.
        microbatches: microbatches of a replica's batch, to keep the stages busy; 4 per partition
            is a good start. 1: one stage works at a time.
        schedule: the order of forward and backward passes. 1f1b: as fast as gpipe, with fewer
            activations in memory. gpipe: all forward passes of an update first. interleaved:
            several stages per process, see chunks, for a smaller bubble and more messages.
            zero_bubble: gradients of weights fill the bubble.
        chunks: stages in each process; more than 1 with schedule=interleaved only.
        active_microbatches: the most microbatches whose activations a process keeps. null: as many
            as the schedule is fastest with.
        costs: cost of a layer in the automatic partition. flops: operations, counted. profile:
            seconds, measured at the start. parameters: their number. uniform: all equal.
        optimize: what the automatic partition balances: speed or memory.
        memory_weight: 0 balances time alone, 1 memory alone. null: 0.2 for optimize=speed, 0.8
            for optimize=memory.
        memory_limit: the most that a stage may take (weights, gradients, optimizer slots, and
            activations in flight), in bytes, or with a unit, such as "2GB" or "1.5GiB". null: no
            limit.
        stages: stages by hand, as {0: "embed|block_[0-5]", 1: "block_[6-9]|head"}: for each stage
            a regular expression that matches whole names of layers. Empty: from `with
            ktrainer.partition(i):` in the model's code, or automatic without it.
        default_partition: the stage of layers that neither stages nor a partition scope names.
            null: refused with stages, 0 with scopes.
        placement: 4 processes and 2 partitions are the replicas (0, 1), (2, 3) with cluster, and
            (0, 2), (1, 3) with spread.
        recompute: recompute activations in the backward pass instead of keeping them: less memory
            for about a third more time.
        engine: all-reduce of gradients between replicas: mpi, horovod or auto, as for
            data_parallel. Messages between stages always go through MPI.
        compression: of gradients between replicas: none, fp16 or bf16, as for data_parallel.
        hierarchical: of sums over replicas on several hosts, as for data_parallel.
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
    compression: Literal["none", "fp16", "bf16"] = "none"
    hierarchical: bool | None = None


@dataclass(frozen=True)
class TfDistributeConfig(BackendConfig):
    """TensorFlow's own strategies: several devices in a process, several processes, or both.

    Attributes:
        name: tf_distribute.
        strategy: default: no strategy, for comparison. one_device: all on one device. mirrored:
            every device of this process has the weights and a slice of each batch.
            central_storage: the same, but the weights are kept once, on the CPU.
            multi_worker_mirrored: mirrored over several processes. parameter_server: workers
            compute, servers keep the weights, a coordinator schedules the steps. tpu: the cores of
            a TPU.
        devices: number of devices per process, or a list of them, such as [GPU:0, GPU:1]. Without
            GPUs a number makes as many logical CPU devices. null: all GPUs, else the CPU.
        cross_device_ops: all-reduce between the devices of one process. auto: nccl with GPUs, else
            reduction_to_one_device.
        communication: all-reduce between processes. auto: nccl with GPUs, else ring.
        bytes_per_pack: size of a pack of gradients between processes, in bytes; 0 leaves it to
            TensorFlow.
        timeout: seconds that a sum over processes, or an update of a worker, may take. null:
            world.deadline.
        start_timeout: seconds to wait for all processes of a cluster at the start.
        auto_shard: how a tf.data pipeline is split over processes. data: each takes its slice of
            every batch. file: its own files; in `fit` that is data.shard=file. off: each reads all
            of its own pipeline; `fit` needs data.batch=per_worker for that.
        join: when the coordinator of parameter servers waits for its workers. step: after each
            update, which gives the numbers of one process. epoch: at the end of the epoch; each
            update uses the newest weights (asynchronous).
        min_shard_bytes: shard variables of parameter_server larger than this over the servers.
            null: no variable is sharded.
        tpu: name or address of the TPU. null: found in the environment; local: that of this
            machine.
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
    ] = "mirrored"
    devices: Any = None
    cross_device_ops: Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"] = (
        "auto"
    )
    communication: Literal["auto", "ring", "nccl"] = "auto"
    bytes_per_pack: int = number(0, at_least=0)
    timeout: float | None = number(None, above=0)
    start_timeout: float = number(60.0, above=0)
    auto_shard: Literal["data", "file", "off"] = "data"
    join: Literal["step", "epoch"] = "epoch"
    min_shard_bytes: int | None = number(None, at_least=1)
    tpu: str | None = None


BACKENDS: dict[str, type[BackendConfig]] = {
    "local": LocalConfig,
    "data_parallel": DataParallelConfig,
    "pipeline": PipelineConfig,
    "tf_distribute": TfDistributeConfig,
}

# Other libraries' names of backends, and what to write here.
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
    "central_storage": "backend=tf_distribute backend.strategy=central_storage",
    "one_device": "backend=tf_distribute backend.strategy=one_device",
    "tpu": "backend=tf_distribute backend.strategy=tpu",
    "mwms": "backend=tf_distribute backend.strategy=multi_worker_mirrored",
    "ps": "backend=tf_distribute backend.strategy=parameter_server",
}

# The same for the values of a key.
VALUE_ALIASES = {
    "backend.schedule": {"simple": "gpipe", "dapple": "1f1b", "zb_h1": "zero_bubble"},
    "backend.strategy": {
        "multiworker": "multi_worker_mirrored",
        "mwms": "multi_worker_mirrored",
        "ps": "parameter_server",
    },
}
