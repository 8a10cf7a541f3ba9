"""The global norm of gradients of which each stage has some: over all stages.

`tf.clip_by_global_norm`, `tf.linalg.global_norm` and an optimizer's `global_clipnorm` get the list
that a process has. A list with the shapes of a cut model's variables is this stage's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.optimizers import base_optimizer
from tensorflow.python.ops import clip_ops

from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import Replacements


@dataclass(frozen=True, eq=False)
class _Stage:
    """The variables of a cut model that this process holds.

    Attributes:
        shapes: of all, in order.
        counts: whether each counts here: of those that several stages hold one counts.
        total: sums a float64 scalar over stages.
    """

    shapes: tuple[tuple[int, ...], ...]
    counts: tuple[bool, ...]
    total: Callable[[tf.Tensor], tf.Tensor]


_stages: list[_Stage] = []
_replaced = Replacements()


def count_over_stages(
    variables: Sequence[Any], owned: Collection[int], total: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """From now on, take global norms of lists shaped as `variables` over all stages.

    Args:
        variables: the trained ones that this process holds.
        owned: `id()` of those that no other process counts.
        total: sums a float64 scalar over the stages, which all call it together.
    """
    if not _stages:
        _replaced.wrap(clip_ops, "global_norm", _over_stages)  # tf.clip_by_global_norm calls it
        _replaced.wrap(tf.linalg, "global_norm", _over_stages)
        _replaced.wrap(base_optimizer, "global_norm", _over_stages)
    shapes = tuple(tuple(v.shape) for v in variables)
    _stages.append(_Stage(shapes, tuple(id(v) in owned for v in variables), total))


@contextmanager
def counting_over_stages(
    variables: Sequence[Any], owned: Collection[int], total: Callable[[tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """`count_over_stages` for as long as a step is traced."""
    count_over_stages(variables, owned, total)
    try:
        yield
    finally:
        _stages.pop()
        if not _stages:
            _replaced.close()


def forget_stages() -> None:
    """Take global norms as TensorFlow does again."""
    _stages.clear()
    _replaced.close()


def _over_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    def global_norm(values: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        values = list(values)
        stage = _stage_of(values)
        if stage is None:
            return original(values, *args, **kwargs)
        present = [v.dtype for v in values if v is not None]
        dtype = present[0] if present else tf.float32
        mine = [v for v, counts in zip(values, stage.counts, strict=True) if counts]
        if any(v is not None for v in mine):
            norm = tf.cast(original(mine, *args, **kwargs), tf.float64)
        else:
            norm = tf.zeros([], tf.float64)
        return tf.cast(tf.sqrt(stage.total(tf.square(norm))), dtype)

    return global_norm


def _stage_of(values: Sequence[Any]) -> _Stage | None:
    """The stage whose gradients a list has; None: it is whole.

    Raises:
        ModelError: it could be a part of a stage's gradients, or not.
    """
    shapes = [None if v is None else tuple(v.shape) for v in values]
    for stage in _stages:
        pairs = zip(shapes, stage.shapes, strict=False)
        if len(shapes) == len(stage.shapes) and all(a is None or a == b for a, b in pairs):
            return stage
    present = Counter(shape for shape in shapes if shape is not None)
    for stage in _stages:
        known = stage.shapes
        some, more = not present - Counter(known), not Counter(known) - present
        if some or more:
            raise ModelError(
                f"the global norm of {len(shapes)} tensors was asked for, which have the shapes of "
                f"{'some' if some else 'all'} of the {len(known)} variables that this stage of a "
                f"model holds{'' if some else ', and others'}. Over one process it "
                "would be wrong: take the norm of the gradients of all model.trainable_variables, "
                "in order, and of nothing else"
            )
    return None
