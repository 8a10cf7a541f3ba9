"""The backends' keys: one dataclass for each, and one line in `BACKENDS`."""

from __future__ import annotations

from dataclasses import dataclass
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
    """The model cut into stages, one process for each. Not part of this version.

    Attributes:
        name: pipeline.
        partitions: number of stages.
        microbatches: parts that a batch is cut into, to keep the stages busy.
    """

    name: str = "pipeline"
    partitions: int = number(MISSING, at_least=1)
    microbatches: int = number(1, at_least=1)


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
    "mirrored": "backend=tf_distribute backend.strategy=mirrored",
    "multi_worker_mirrored": "backend=tf_distribute backend.strategy=multi_worker_mirrored",
    "parameter_server": "backend=tf_distribute backend.strategy=parameter_server",
}
