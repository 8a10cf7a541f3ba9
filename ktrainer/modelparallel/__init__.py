"""Model parallelism in training loops of one's own: the interface of SageMaker's smp.

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
