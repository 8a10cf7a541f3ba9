"""A model in partitions: each rank's variables are made equal with those who hold them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import distributed
from ktrainer.callbacks import Audit, BroadcastVariables
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import DivergenceError
from ktrainer.steps.named_variables import all_variables, built_optimizers, model_variables
from ktrainer.steps.variable_placement import Placement, place
from tests.callbacks.helpers import small_model

LAYOUT = Layout(2, 2)
GRIDS = [LAYOUT, Layout(2, 2, "spread"), Layout(2, 1), Layout(1, 2)]


@contextmanager
def placed(model: Any, layout: Layout) -> Iterator[Placement]:
    """The first layer is on the first partition, the last on the last; both have the first bias,
    and with it its momentum, and the optimizer's counter and rate."""
    whole: Any = distributed.current_world()
    partition, replica = layout.partition_of(whole.rank), layout.replica_of(whole.rank)
    weights = [id(v) for v in model.trainable_variables]
    optimizer = [id(v) for v in model.optimizer.variables]
    common = [weights[1], *optimizer[:2], optimizer[3]]
    first = [*common, weights[0], optimizer[2]]
    second = [*weights[2:], *optimizer[4:]]
    if layout.partitions == 1:
        held = owned = [*first, *second]
    else:
        held = first if partition == 0 else [*common, *second]
        owned = first if partition == 0 else second
    stages = whole.group(layout.model_ranks(replica), f"the partitions of replica {replica}")
    copies = whole.group(layout.copy_ranks(partition), f"the copies of partition {partition}")
    placement = Placement(
        partition, layout.partitions, replica, layout.replicas, held, owned, stages, copies
    )
    place(model, placement)
    try:
        yield placement
    finally:
        stages.close()
        copies.close()


def _own_model() -> Any:
    """A model with weights, slots and a learning rate of this rank's own."""
    rank = distributed.current_world().rank
    model = small_model(seed=rank)
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(np.full(variable.shape, rank + 1, variable.dtype))
    return model


def _broadcast(layout: Layout, root: int) -> tuple[list[bool], list[Any], list[Any]]:
    model = _own_model()
    with placed(model, layout) as placement:
        before = [v.numpy() for _, v in all_variables(model)]
        callback = BroadcastVariables(root)
        callback.set_model(model)
        callback.on_restore(callback.progress)
        holds = [placement.holds(v) for _, v in all_variables(model)]
        return holds, before, [v.numpy() for _, v in all_variables(model)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", GRIDS, ids=str)
def test_broadcast(ranks: Callable[..., Any], layout: Layout) -> None:
    root = layout.replicas - 1
    results = ranks(layout.size).run(_broadcast, layout, root)
    for rank, (holds, _, after) in enumerate(results):
        assert any(holds)
        for k, held in enumerate(holds):
            # The first partition that holds a variable owns it.
            owner = next(r for r in layout.model_ranks(root) if results[r][0][k]) if held else rank
            assert after[k].tobytes() == results[owner][1][k].tobytes(), (rank, k)
    assert any(
        b.tobytes() != a.tobytes()
        for _, before, after in results
        for b, a in zip(before, after, strict=True)
    )


def _names() -> tuple[list[str], list[str], int]:
    model = _own_model()
    every = [name for name, _ in all_variables(model)]
    with placed(model, LAYOUT):
        mine = [name for name, _ in model_variables(model)]
        other = small_model()
        assert not other.optimizer.built
        place(
            other,
            Placement(0, 1, 0, 1, (), (), distributed.SingleWorld(), distributed.SingleWorld()),
        )
        built_optimizers(other)
        return every, mine, len(other.optimizer.variables)


@pytest.mark.exhaustive
def test_names_are_those_of_the_whole_model(ranks: Callable[..., Any]) -> None:
    for every, mine, slots in ranks(4).run(_names):
        assert set(mine) < set(every)
        assert mine == [name for name in every if name in mine]
        assert slots == 2  # the counter and the rate: the backend builds the rest


def _audit(spoiled: int | None, held: bool) -> None:
    model = small_model(seed=0)
    model.optimizer.build(model.trainable_variables)
    with placed(model, LAYOUT) as placement:
        if distributed.current_world().rank == spoiled:
            for _, variable in all_variables(model):
                if placement.holds(variable) == held:
                    variable.assign(keras.ops.ones_like(variable) * 7)
        callback = Audit(every="1ba")
        callback.set_model(model)
        callback.on_train_begin()
        callback.progress.step += 1
        callback.on_step_end(1)


@pytest.mark.exhaustive
def test_audit_compares_the_copies_of_a_partition(ranks: Callable[..., Any]) -> None:
    ranks(4).run(_audit, None, True)
    ranks(4).run(_audit, 3, False)  # what it does not hold has no meaning
    for outcome in ranks(4).outcomes(_audit, 3, True):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "rank 1: " in str(outcome.error)
        assert "rank 3: " in str(outcome.error)
        assert "model/sequential" in str(outcome.error)
