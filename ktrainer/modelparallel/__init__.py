"""Model parallelism in custom training loops: the interface of SageMaker's smp.

    import ktrainer.modelparallel as smp

    smp.init({"partitions": 2, "microbatches": 4})

A `DistributedModel` is cut into stages, one in each process; a function decorated with `step` runs
once for each microbatch, through all of them. Start the script with `ktrainer run -n N script.py`,
mpirun or srun. `Trainer.fit` with `backend=pipeline` needs none of it.

settings.py         the keys of init(config)
state.py            init, shutdown, ranks and groups     host_messages.py      objects between ranks
distributed_model.py   models and partitions             checkpoint_manager.py files
step.py, split_arguments.py, step_output.py   a step of one's own, and what it returns
model_call.py, coroutines.py   run it through the stages, by `backends/pipeline/runtime`
"""

from __future__ import annotations

from typing import Any

from ktrainer.dataparallel.unavailable import of_tensorflow_1, refuse_name
from ktrainer.modelparallel.checkpoint_manager import CheckpointManager
from ktrainer.modelparallel.distributed_model import (
    DistributedModel,
    partition,
    register_post_partition_hook,
)
from ktrainer.modelparallel.host_messages import (
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from ktrainer.modelparallel.state import (
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    init,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    shutdown,
    size,
)
from ktrainer.modelparallel.step import gradients, step
from ktrainer.modelparallel.step_output import StepOutput

WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP

_HOROVOD = (
    "{name} is a name of the data-parallel library: import ktrainer.dataparallel as hvd, and "
    'smp.init({{..., "horovod": True}}), with which it acts over the replicas of a stage; reduce '
    "gradients outside of the step, hvd.allreduce(g.accumulate())."
)
_FILES = (
    "{name} belongs to the library for PyTorch. Use smp.CheckpointManager, or model.save_model "
    "for the whole model."
)
_TENSOR = (
    "{name} belongs to the library for PyTorch: layers are not split over processes here, whole "
    "layers are. Use the partitions of smp.init, and smp.mp_rank() and smp.dp_rank()."
)
_PRECISION = (
    "{name} belongs to the library for PyTorch. Use "
    'keras.mixed_precision.set_global_policy("mixed_bfloat16"), which needs no scaling.'
)
_INSTEAD = {
    **of_tensorflow_1(
        "@smp.step and smp.gradients, and save it with smp.CheckpointManager.",
        "as an smp.DistributedModel and train it in a loop with @smp.step, or give a plain one to "
        "ktrainer's Trainer.fit with backend.name=pipeline: checkpoint.*, callbacks and `ktrainer "
        "run` do what hooks did.",
    ),
    "DistributedOptimizer": (
        "{name}: a plain Keras 3 optimizer applies what smp.gradients and accumulate() give, "
        "outside of the step. With replicas, reduce gradients first: hvd.allreduce("
        "g.accumulate()), of ktrainer.dataparallel."
    ),
    **dict.fromkeys(
        ("DistributedGradientTape", "allreduce", "broadcast_variables", "Compression"), _HOROVOD
    ),
    **dict.fromkeys(("save", "load"), _FILES),
    **dict.fromkeys(("tensor_parallelism", "set_tensor_parallelism"), _TENSOR),
    **dict.fromkeys(("tp_rank", "tp_size", "rdp_rank", "rdp_size"), _TENSOR),
    **dict.fromkeys(("get_tp_group", "get_rdp_group"), _TENSOR),
    **dict.fromkeys(("amp", "GradScaler"), _PRECISION),
    "set_partition": "{name} belongs to the library for PyTorch; use `with smp.partition(i):`.",
}


def __getattr__(name: str) -> Any:
    return refuse_name(__name__, name, _INSTEAD)


__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "gradients",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "step",
]
