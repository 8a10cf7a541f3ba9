"""Undo the cut of a model: every process has all of its variables again."""

from __future__ import annotations

from typing import Any

import numpy as np

from ktrainer.backends.pipeline.backend import PLANNED
from ktrainer.backends.pipeline.deferred import know_by_value
from ktrainer.callbacks.variables import all_variables, view_of
from ktrainer.checkpoint.encoding import dtype_named
from ktrainer.steps.elsewhere import bring_back, elsewhere
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.placement import Placement, forget, placement_of
from ktrainer.steps.programs import forget_programs
from ktrainer.world.arrays import broadcast_arrays


def join_stages(model: Any) -> None:
    """Give every process the values of all variables of `model` and its optimizers; it may then be
    compiled and cut again. All ranks call this together."""
    placement = placement_of(model)
    if placement is not None:
        _exchange([v for _, v in all_variables(model)], placement)
        forget(model)
        for name in ("get_weights", "set_weights"):
            vars(model).pop(name, None)  # as the cut has set them
        for optimizer in optimizers_of(model):
            know_by_value(getattr(optimizer, "inner_optimizer", optimizer))
    vars(model).pop(PLANNED, None)
    forget_programs(model)


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
