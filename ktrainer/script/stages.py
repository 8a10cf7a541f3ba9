"""Undo the cut of a model, or bring its variables together for one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ktrainer.backends.pipeline.backend import PLANNED
from ktrainer.callbacks.variables import all_variables, view_of
from ktrainer.checkpoint.encoding import dtype_named
from ktrainer.errors import ModelError
from ktrainer.steps.elsewhere import bring_back, elsewhere, take_away
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.placement import Placement, placement_of, remove_placement
from ktrainer.steps.program_cache import forget_programs
from ktrainer.world.arrays import broadcast_arrays


def join_stages(model: Any) -> None:
    """Give every process the values of all variables of `model` and its optimizers; it may then be
    compiled and cut again. All ranks call this together."""
    placement = placement_of(model)
    if placement is not None:
        _exchange([v for _, v in all_variables(model)], placement)
        remove_placement(model)
        for name in ("get_weights", "set_weights"):
            vars(model).pop(name, None)  # as the cut has set them
    vars(model).pop(PLANNED, None)
    forget_programs(model)


@contextmanager
def borrowed(model: Any, cut: Iterable[Any]) -> Iterator[None]:
    """While it lasts, every process has all variables of `model`, a model that is not cut: those
    too that it shares with others which are. All ranks enter together.

    Args:
        model: whose values are to be read; what is assigned to them elsewhere is lost.
        cut: models that are cut into stages.
    """
    mine = {id(v) for v in model.variables}
    away: list[tuple[Any, int]] = []
    try:
        for other in cut:
            placement = placement_of(other)
            shared = [v for v in other.variables if id(v) in mine]
            if other is model or placement is None or not shared:
                continue
            away += [(v, place.partition) for v in shared if (place := elsewhere(v)) is not None]
            _exchange(shared, placement)
        yield
    finally:
        for variable, partition in away:
            if elsewhere(variable) is None:
                take_away(variable, partition)


def know_variables(model: Any) -> None:
    """Let the optimizers of `model`, which is not cut, know its variables by the values that they
    have now: cuts of models that share them have made others.

    Raises:
        ModelError: an optimizer has excluded some of them from weight decay, by their old values.
    """
    for each in optimizers_of(model):
        optimizer = getattr(each, "inner_optimizer", each)
        known = optimizer._trainable_variables if optimizer.built else []
        places = {optimizer._var_key(v): i for i, v in enumerate(known)}
        if places == getattr(optimizer, "_trainable_variables_indices", places):
            continue
        if getattr(optimizer, "_exclude_from_weight_decay", None):
            raise ModelError(
                f"models that share layers take turns in a pipeline, and one of them excludes "
                f"weights from the weight decay of {type(optimizer).__name__}, which would forget "
                "them: train with backend=data_parallel"
            )
        optimizer._trainable_variables_indices = places


def _exchange(variables: list[Any], placement: Placement) -> None:
    """Bring each variable from the partition that owns it to the others."""
    owned = [k for k, variable in enumerate(variables) if placement.owns(variable)]
    every = placement.model.allgather(owned, "list the variables of each stage")
    for partition, theirs in enumerate(every):
        arrays = [
            view_of(variables[k]) if partition == placement.partition else _empty(variables[k])
            for k in theirs
        ]
        what = f"variables of stage {partition}, for all"
        received = broadcast_arrays(arrays, placement.model, partition, what)
        for k, value in zip(theirs, received, strict=True):
            if elsewhere(variables[k]) is not None:
                bring_back(variables[k], value)


def _empty(variable: Any) -> np.ndarray:
    return np.empty(tuple(variable.shape), dtype_named(str(variable.dtype)))
