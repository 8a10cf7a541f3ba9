"""Placement of a model's variables: each process holds those that its stages read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph
from ktrainer.backends.pipeline.placement.deferred_variables import (
    deferred,
    know_by_value,
    make_values,
)
from ktrainer.distributed import World
from ktrainer.distributed.rank_layout import Layout
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps.optimizers import aligned_slots
from ktrainer.steps.remote_variable import make_remote
from ktrainer.steps.variable_placement import Placement, place


def holders_of(
    model: Any, stages: Iterable[StageGraph], partitions: int, everywhere: bool = False
) -> dict[int, list[int]]:
    """The partitions that read each variable of `model`, by the variable's `id()`, in order.

    Args:
        stages: of all graphs of the model, for training and for inference.
        partitions: stage s is in partition s modulo this.
        everywhere: all partitions hold variables that no stage reads; else the first does.
    """
    found: dict[int, set[int]] = {id(v): set() for v in model.variables}
    for stage in stages:
        for variable in (*stage.trainable, *stage.non_trainable):
            found.setdefault(id(variable), set()).add(stage.index % partitions)
    unread = list(range(partitions)) if everywhere else [0]
    return {key: sorted(readers) or unread for key, readers in found.items()}


def build_optimizer(model: Any) -> dict[int, Any]:
    """Build the model's optimizer for all its weights, its slots without values.

    Returns:
        For each slot, by `id()`, the weight that it belongs to.
    """
    optimizer = optimizer_of(model)
    if optimizer is None:
        return {}
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    belongs: dict[int, Any] = {}
    if not optimizer.built:
        with deferred(), _watch_slots(belongs):
            optimizer.build(model.trainable_variables)
    belongs.update(aligned_slots(plain))
    return belongs


def optimizer_of(model: Any) -> Any:
    """The compiled optimizer; None if there is none."""
    return getattr(model, "optimizer", None)


@contextmanager
def _watch_slots(belongs: dict[int, Any]) -> Iterator[None]:
    """Record which weight each slot belongs to; inside of `deferred`."""
    original = BaseOptimizer.add_variable_from_reference

    def add(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, reference_variable, *args, **kwargs)
        belongs[id(made)] = reference_variable
        return made

    with replaced((TFOptimizer, "add_variable_from_reference", add)):
        yield


def place_model(
    model: Any,
    holders: dict[int, list[int]],
    slots: dict[int, Any],
    layout: Layout,
    worlds: tuple[World, World],
    rank: int,
) -> Placement:
    """Make the values that this process holds, free all others, and record the placement.

    Args:
        holders: from `holders_of`.
        slots: from `build_optimizer`.
        worlds: groups of the processes of this replica, and of this partition.
    """
    here, optimizer = layout.partition_of(rank), optimizer_of(model)
    every = _readers(model, holders, slots, layout.partitions)
    held = [v for v, readers in every if here in readers]
    owned = [v for v, readers in every if readers[0] == here]
    make_values(model, held)
    for plain in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if plain is not None:
            know_by_value(plain)
    for variable, readers in every:
        if here not in readers:
            make_remote(variable, readers[0])
    replica = layout.replica_of(rank)
    placement = Placement(
        partition=here,
        partitions=layout.partitions,
        replica=replica,
        replicas=layout.replicas,
        held=frozenset(map(id, held)),
        owned=frozenset(map(id, owned)),
        model=worlds[0],
        copies=worlds[1],
    )
    place(model, placement)
    _weights_held(model, placement)
    return placement


def _readers(
    model: Any, holders: dict[int, list[int]], slots: dict[int, Any], partitions: int
) -> list[tuple[Any, list[int]]]:
    """Each variable of the model and its optimizer, and the partitions that hold it.

    A slot is held with its weight; variables of no weight, such as the step, by all partitions.
    """
    optimizer, counters = optimizer_of(model), _first_trained(model, holders)
    every: list[tuple[Any, list[int]]] = [(v, holders[id(v)]) for v in model.variables]
    for variable in optimizer.variables if optimizer is not None else ():
        weight = slots.get(id(variable))
        everywhere = [counters, *range(partitions)]
        every.append((variable, everywhere if weight is None else holders[id(weight)]))
    return every


def _first_trained(model: Any, holders: dict[int, list[int]]) -> int:
    """The first partition with a trained variable, which owns the optimizer's counters."""
    return min((holders[id(v)][0] for v in model.trainable_variables), default=0)


def _weights_held(model: Any, placement: Placement) -> None:
    """Let Keras' callbacks that keep weights (EarlyStopping) keep those that this rank holds.

    For them `get_weights` returns None for remote variables, which `set_weights` skips. Other
    callers get the whole model's weights or an error.
    """

    def get_weights() -> list[Any]:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if not caller.startswith("keras."):
            return [v.numpy() for v in model.weights]
        return [v.numpy() if placement.holds(v) else None for v in model.weights]

    def set_weights(weights: Sequence[Any]) -> None:
        for variable, value in zip(model.weights, weights, strict=True):
            if value is not None and placement.holds(variable):
                variable.assign(value)

    model.get_weights, model.set_weights = get_weights, set_weights
