"""`init` and `shutdown`, ranks, and names that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.dataparallel.helpers import caught, started


def _life() -> dict[str, Any]:
    import ktrainer.dataparallel as sdp
    from ktrainer.distributed import current_world

    calls: dict[str, Callable[[], Any]] = {
        "size": sdp.size,
        "rank": sdp.rank,
        "local_rank": sdp.local_rank,
        "local_size": sdp.local_size,
        "allreduce": partial(sdp.allreduce, 1.0, 0, 1),
        "oob_allreduce": partial(sdp.oob_allreduce, 1.0),
        "broadcast": partial(sdp.broadcast, 1.0, 0),
        "broadcast_variables": partial(sdp.broadcast_variables, [], 0),
        "tape": partial(sdp.DistributedGradientTape, None),
        "optimizer": partial(sdp.DistributedOptimizer, None),
        "callback": partial(sdp.keras.callbacks.BroadcastGlobalVariablesCallback, 0),
        "join": sdp.join,
        "set": partial(sdp.add_process_set, [0]),
    }
    before = {name: caught(call) for name, call in calls.items()}
    known = sdp.is_initialized()
    deadline = current_world().deadline
    sdp.init(deadline=7)
    twice = caught(sdp.init)
    numbers = [sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size()]
    numbers += [sdp.cross_rank(), sdp.cross_size(), sdp.is_homogeneous(), sdp.is_initialized()]
    assert current_world().deadline == 7
    sdp.shutdown()
    sdp.shutdown()
    assert not sdp.is_initialized()
    assert current_world().deadline == deadline
    after = caught(sdp.rank)
    sdp.init()
    again = float(sdp.allreduce(float(sdp.rank()), 0, 1))
    sdp.shutdown()
    return {
        "before": before, "known": known, "twice": twice, "numbers": numbers, "after": after,
        "again": again,
    }  # fmt: skip


def test_init_once_and_again_after_shutdown(ranks: Callable[..., Any]) -> None:
    for rank, found in enumerate(ranks(2).run(_life)):
        for name, error in found["before"].items():
            assert error.startswith("WorldError: ktrainer.dataparallel is not initialised"), name
        assert not found["known"]
        assert found["twice"].startswith("WorldError: init was called more than once")
        assert "already initialised" in found["twice"]
        assert found["numbers"] == [rank, 2, rank, 2, 0, 1, True, True]
        assert "is not initialised" in found["after"]
        assert found["again"] == 0.5


def _facts() -> list[Any]:
    with started() as hvd:
        facts = [hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported()]
        facts += [hvd.nccl_built(), hvd.gloo_built(), hvd.gloo_enabled(), hvd.cuda_built()]
        facts += [hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()]
        tensors = [hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()]
        return [*facts, *(int(tensor) for tensor in tensors), hvd.check_num_rank_power_of_2(6)]


def test_facts(ranks: Callable[..., Any]) -> None:
    expected = [True, True, True, *[False] * 7]
    assert ranks(2).run(_facts) == [[*expected, 2, rank, 2, rank, False] for rank in range(2)]


REFUSED = {
    "BroadcastGlobalVariablesHook": "TensorFlow 2.16.*broadcast_variables",
    "broadcast_global_variables": "TensorFlow 2.16.*broadcast_variables",
    "MonitoredTrainingSession": "TensorFlow 2.0.*DistributedGradientTape",
    "SessionRunHook": "TensorFlow 2.0",
    "Estimator": "2.16.*Trainer.fit",
    "estimator": "2.16.*Trainer.fit",
    "TensorFlowKerasState": "elastic.TensorFlowKerasState",
    "spark": "ktrainer run -n",
    "start_timeline": "profiler",
    "SyncBatchNormalization": "synchronized=True",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_of_another_library_says_what_to_use(name: str) -> None:
    import ktrainer.dataparallel
    from ktrainer.errors import SetupError

    for module in (ktrainer.dataparallel, ktrainer.dataparallel.keras):
        with pytest.raises(SetupError, match=REFUSED[name]):
            exec(f"from {module.__name__} import {name}")
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = ktrainer.dataparallel.frobnicate


def test_all_names_are_there() -> None:
    import ktrainer.dataparallel as hvd

    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
    assert [name for name in hvd.keras.__all__ if not hasattr(hvd.keras, name)] == []


def _positions() -> list[Any]:
    with started() as hvd:
        one = float(hvd.rank() + 1)
        return [
            float(hvd.allreduce(one, 0, 1)),
            float(hvd.allreduce(one, param_index=0, num_params=1, op=hvd.ReduceOp.SUM)),
            float(hvd.allreduce(one, False)),
            float(hvd.allreduce(one, average=False)),
            float(hvd.allreduce(one, op=hvd.Sum, name="loss")),
            caught(lambda: hvd.allreduce(one, hvd.Sum)),
            caught(lambda: hvd.allreduce(one, op="sum")),
            caught(lambda: hvd.allreduce(True)),
            caught(lambda: hvd.allreduce(one, compression="fp16")),
            float(hvd.overlap(one)),
        ]


def test_how_positional_arguments_are_read(ranks: Callable[..., Any]) -> None:
    for rank, found in enumerate(ranks(2).run(_positions)):
        assert found[:5] == [1.5, 3.0, 3.0, 3.0, 3.0]
        assert "param_index and num_params" in found[5]
        assert "ReduceOp.SUM" in found[6]
        assert "Cast booleans" in found[7]
        assert "Compression.fp16" in found[8]
        assert found[9] == rank + 1
