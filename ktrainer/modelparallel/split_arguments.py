"""Arguments of a step, split into those of its microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.errors import DataError, ModelError


def split_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
    whole: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Positional and keyword arguments of each microbatch.

    Args:
        function: what they are for.
        count: of microbatches.
        whole: names of arguments that all get as they are.
        axes: the axis that an argument is split along, by its name; otherwise 0.

    Raises:
        ModelError: a name that is no argument of `function`.
        DataError: a tensor's size is not divisible by `count`, or it has no such axis.
    """
    axes = axes or {}
    signature = inspect.signature(function)
    open_names = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in (*whole, *axes):
        if name not in signature.parameters and not open_names:
            raise ModelError(
                f"@smp.step names the argument {name!r}, but {function.__name__} has "
                f"{', '.join(signature.parameters)}"
            )
    bound = signature.bind(*args, **kwargs)
    split: dict[str, list[Any]] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            each = {k: _parts(k, v, count, whole, axes) for k, v in value.items()}
            split[name] = [{k: v[i] for k, v in each.items()} for i in range(count)]
        else:
            split[name] = _parts(name, value, count, whole, axes)
    made = []
    for i in range(count):
        part = inspect.BoundArguments(signature, {k: v[i] for k, v in split.items()})
        made.append((part.args, part.kwargs))
    return made


def _parts(
    name: str, value: Any, count: int, whole: Sequence[str], axes: Mapping[str, int]
) -> list[Any]:
    if name in whole:
        return [value] * count
    leaves = tf.nest.flatten(value)
    cut = [_cut(name, leaf, count, axes.get(name, 0)) for leaf in leaves]
    return [tf.nest.pack_sequence_as(value, [c[i] for c in cut]) for i in range(count)]


def _cut(name: str, leaf: Any, count: int, axis: int) -> list[Any]:
    own = getattr(leaf, "smp_slice", None)
    if own is not None:
        return [own(count, i, axis) for i in range(count)]
    if not (tf.is_tensor(leaf) or isinstance(leaf, np.ndarray)):
        return [leaf] * count
    rank = len(leaf.shape)
    if not -rank <= axis < rank:
        raise DataError(
            f"argument {name!r} has shape {tuple(leaf.shape)}, which has no axis {axis} to split "
            "into microbatches: name it in non_split_inputs of @smp.step"
        )
    size = leaf.shape[axis]
    if size is None:
        raise DataError(
            f"argument {name!r} has shape {tuple(leaf.shape)}: the size of a batch must be known "
            "to split it into microbatches. Use drop_remainder=True where batches are made"
        )
    if size % count:
        raise DataError(
            f"argument {name!r} has {size} entries along axis {axis}, which is not divisible by "
            f"microbatches={count}. The nearest legal sizes are {size - size % count} and "
            f"{size - size % count + count}; or name it in non_split_inputs of @smp.step"
        )
    return list(tf.split(leaf, count, axis))
