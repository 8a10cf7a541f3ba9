"""Gather all variables of a cut model in every process, for good or for one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.planned_model import PLANNED
from ktrainer.distributed.array_transfer import broadcast_arrays
from ktrainer.errors import ModelError
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.program_cache import forget_programs
from ktrainer.steps.remote_variable import is_remote, make_local, make_remote
from ktrainer.steps.variable_placement import Placement, placement_of, remove_placement


def gather_stages(model: Any) -> None:
    """Give every process the values of all variables of `model` and its optimizers.

    The model may then be compiled and cut again. All ranks call this together.
    """
    placement = placement_of(model)
    if placement is not None:
        slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        _exchange([*model.variables, *slots], placement)
        remove_placement(model)
        for name in ("get_weights", "set_weights"):
            vars(model).pop(name, None)  # which the cut has replaced
    vars(model).pop(PLANNED, None)
    forget_programs(model)


@contextmanager
def borrowed(model: Any, cut: Iterable[Any]) -> Iterator[None]:
    """Inside the block every process has all variables of `model`, which is not cut.

    It may share variables with models that are. All ranks enter together.

    Args:
        model: its values may be read; assignments to remote variables are lost.
        cut: models that are cut into stages.
    """
    mine = {id(v) for v in model.variables}
    remote: list[tuple[Any, int]] = []
    try:
        for other in cut:
            placement = placement_of(other)
            shared = [v for v in other.variables if id(v) in mine]
            if other is model or placement is None or not shared:
                continue
            remote += [(v, place.partition) for v in shared if (place := is_remote(v)) is not None]
            _exchange(shared, placement)
        yield
    finally:
        for variable, partition in remote:
            if is_remote(variable) is None:
                make_remote(variable, partition)


def know_variables(model: Any) -> None:
    """Index the variables of `model`, which is not cut, in its optimizers by their present values.

    Cuts of models that share the variables have made new values.

    Raises:
        ModelError: an optimizer has excluded some of them from weight decay, by old values.
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
    """Send each variable from the stage that owns it to the others."""
    owned = [k for k, variable in enumerate(variables) if placement.owns(variable)]
    every = placement.model.allgather(owned, "list the variables of each stage")
    for partition, theirs in enumerate(every):
        arrays = [
            _value(variables[k]) if partition == placement.partition else _empty(variables[k])
            for k in theirs
        ]
        what = f"variables of stage {partition}, for all"
        received = broadcast_arrays(arrays, placement.model, partition, what)
        for k, value in zip(theirs, received, strict=True):
            if is_remote(variables[k]) is not None:
                make_local(variables[k], value)


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def _empty(variable: Any) -> np.ndarray:
    return np.empty(tuple(variable.shape), tf.as_dtype(variable.dtype).as_numpy_dtype)
