"""Two ranks that share one GPU: data parallelism and pipelines through host memory.

NCCL needs a GPU for each rank, and a CUDA-aware MPI is not what `pip install` gives: neither is
used here. Both ranks grow their memory, so that they fit beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.contracts.running import SEED, Outcome, digest
from tests.dist.harness import Ranks
from tests.gpu.compare import error_of_change, same_numbers, same_numbers_in_stages
from tests.gpu.device import Device
from tests.gpu.training import beginning, updates, zoo

pytestmark = pytest.mark.gpu

DATA_PARALLEL = {"name": "data_parallel", "engine": "mpi"}
PIPELINE = {"name": "pipeline", "partitions": 2, "microbatches": 4}
HALF = 4  # errors of 16 bits, in those of one process on the CPU: as in test_local.py


def equal_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> bool:
    """Whether ranks have the same bits."""
    return len({digest(rank[name]) for rank in ranks}) == 1


@pytest.mark.parametrize("xla", [False, True], ids=["plain", "XLA"])
def test_data_parallel_ranks_have_the_numbers_of_one_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    models: Callable[..., tuple[str, ...]],
    xla: bool,
) -> None:
    names = models("mlp", "regularised" if xla else "synchronized_batch_norm")
    expected = truth(*names)
    ranks = on_device(2).run(zoo, names, backend=DATA_PARALLEL, trainer={"xla": xla}, deadline=240)
    seen(difference=same_numbers(ranks[0], expected))
    for name in names:
        assert equal_on_all_ranks(ranks, name), f"{name}: ranks differ"


def test_accumulated_gradients(
    on_device: Callable[..., Ranks], on_cpu: Ranks, seen: Callable[..., None]
) -> None:
    (truth,) = on_cpu.run(zoo, ["mlp"], trainer={"accumulate": 3}, deadline=120)
    ranks = on_device(2).run(
        zoo, ["mlp"], backend=DATA_PARALLEL, trainer={"accumulate": 3}, deadline=120
    )
    seen(difference=same_numbers(ranks[0], truth))
    assert equal_on_all_ranks(ranks, "mlp")


def test_sparse_gradients(
    on_device: Callable[..., Ranks],
    device: Device,
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
) -> None:
    """A GPU adds up the gradients of a repeated row in any order, unless it is deterministic: then
    ranks, which each do so, need not have the same bits. A CPU in its place has an order."""
    expected = truth("masked_lstm")
    if device.is_gpu:
        unordered = on_device(2).run(
            zoo, ["masked_lstm"], backend=DATA_PARALLEL, health={"audit_every": None}, deadline=120
        )
        seen(
            difference=same_numbers(unordered[0], expected),
            equal_bits=equal_on_all_ranks(unordered, "masked_lstm"),
        )
    ordered = on_device(2).run(
        zoo,
        ["masked_lstm"],
        backend=DATA_PARALLEL,
        seed=SEED,
        trainer={"deterministic": True},
        deadline=120,
    )
    same_numbers(ordered[0], expected)
    assert equal_on_all_ranks(ordered, "masked_lstm")


@pytest.mark.parametrize("backend", [DATA_PARALLEL, PIPELINE], ids=lambda backend: backend["name"])
def test_ranks_in_sixteen_bits(
    on_device: Callable[..., Ranks],
    on_cpu: Ranks,
    seen: Callable[..., None],
    backend: dict[str, Any],
) -> None:
    """Gradients of 16 bits on the wire, or activations in the messages of stages."""
    (start,) = on_cpu.run(beginning, "wide")
    (truth,) = on_cpu.run(updates, "wide", "float64", deadline=120)
    (cpu,) = on_cpu.run(updates, "wide", "mixed_bfloat16", deadline=120)
    ranks = on_device(2).run(updates, "wide", "mixed_bfloat16", backend=backend, deadline=120)
    error, of_cpu = error_of_change(ranks, truth, start), error_of_change(cpu, truth, start)
    seen(error=error, of_the_cpu=of_cpu)
    assert 1e-5 < error <= HALF * of_cpu


@pytest.mark.parametrize("xla", [False, True], ids=["plain", "XLA"])
def test_stages_have_the_numbers_of_one_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    models: Callable[..., tuple[str, ...]],
    xla: bool,
) -> None:
    names = models("mlp", "skip_connections", *([] if xla else ["masked_lstm"]))
    expected = truth(*names)
    ranks = on_device(2).run(zoo, names, backend=PIPELINE, trainer={"xla": xla}, deadline=240)
    seen(difference=same_numbers_in_stages(ranks, expected))


def test_replicas_of_a_stage_have_the_numbers_of_one_cpu(
    on_device: Callable[..., Ranks],
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
) -> None:
    """Sums over replicas are made in the gradients' memory on CPUs only."""
    backend = {"name": "pipeline", "partitions": 1, "microbatches": 4}
    ranks = on_device(2).run(zoo, ["mlp"], backend=backend, deadline=120)
    seen(difference=same_numbers(ranks[0], truth("mlp")))
    assert equal_on_all_ranks(ranks, "mlp")
