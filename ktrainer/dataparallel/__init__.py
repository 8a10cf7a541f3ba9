"""Data parallelism in custom training loops: the interface of Horovod and SageMaker's sdp.

    import ktrainer.dataparallel as hvd      # or: as sdp

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)

Each process trains on its own data with a batch of its own; gradients are averaged over ranks.
Start the script with `ktrainer run -n N script.py`, mpirun or srun. `Trainer.fit` needs none of it.

state.py        init, shutdown, process sets    options.py     ReduceOp, Compression
ranks.py        rank, size, builds              collectives.py, rows.py, objects.py   calls
gradient_tape.py, optimizer.py, gradients.py, local_variables.py, keras_hooks.py   gradients
callbacks.py, keras/   for Model.fit on each rank
elastic.py, elastic_states.py, elastic_callbacks.py   loops that continue when ranks are lost
channel.py      a communicator on which ranks compare each call before they make it: calls.py
                describes a call, handlers.py carries it out on arrays; and sums in fused buckets
rank_group.py   the channels of a process set
host_calls.py, reductions.py   calls from eager and compiled code
adasum.py, join.py, process_sets.py, unavailable.py
"""

from __future__ import annotations

from typing import Any

from ktrainer.dataparallel import callbacks, elastic, keras
from ktrainer.dataparallel.collectives import (
    allreduce,
    broadcast,
    grouped_allreduce,
    oob_allreduce,
    overlap,
)
from ktrainer.dataparallel.gradient_tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from ktrainer.dataparallel.join import join
from ktrainer.dataparallel.objects import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_variables,
)
from ktrainer.dataparallel.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.dataparallel.process_sets import ProcessSet, global_process_set
from ktrainer.dataparallel.ranks import (
    ccl_built,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rank_op,
    rocm_built,
    size,
    size_op,
)
from ktrainer.dataparallel.rows import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from ktrainer.dataparallel.state import (
    add_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from ktrainer.dataparallel.unavailable import refuse_name

Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX
Product, Adasum = ReduceOp.PRODUCT, ReduceOp.ADASUM


def __getattr__(name: str) -> Any:
    return refuse_name(__name__, name)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "oob_allreduce",
    "overlap",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
]
