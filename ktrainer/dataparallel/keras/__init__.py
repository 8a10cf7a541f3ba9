"""The names that scripts with `model.fit` take from Horovod's and SageMaker's `keras` modules.

They are those of `ktrainer.dataparallel`.
"""

from __future__ import annotations

from typing import Any

from ktrainer.dataparallel import elastic
from ktrainer.dataparallel.collectives import allreduce, broadcast
from ktrainer.dataparallel.keras import callbacks
from ktrainer.dataparallel.objects import (
    allgather_object,
    broadcast_object,
    broadcast_variables,
)
from ktrainer.dataparallel.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.dataparallel.ranks import local_rank, local_size, rank, size
from ktrainer.dataparallel.rows import allgather
from ktrainer.dataparallel.state import init, is_initialized, shutdown
from ktrainer.dataparallel.unavailable import refuse_name

Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX


def __getattr__(name: str) -> Any:
    return refuse_name(__name__, name)


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
