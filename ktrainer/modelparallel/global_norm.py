"""The global norm of gradients of which each stage has some: over all stages.

`tf.clip_by_global_norm`, `tf.linalg.global_norm` and an optimizer's `global_clipnorm` get the list
that a process has. A list with the shapes of a cut model's variables is this stage's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from tensorflow.python.ops import clip_ops

from ktrainer.distributed import World
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import Replacements

_Shapes = tuple[tuple[int, ...], ...]

_stages: list[tuple[_Shapes, World]] = []  # shapes of the variables held, for each cut model
_replaced = Replacements()
_last: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the sum before, by graph


def count_over_stages(variables: Sequence[Any], stages: World) -> None:
    """From now on, take global norms of lists shaped as `variables` over all stages.

    Args:
        variables: the trained ones that this process holds; no other one does.
        stages: the processes of this replica.
    """
    if stages.size == 1:
        return
    if not _stages:
        _replaced.wrap(clip_ops, "global_norm", _over_stages)  # tf.clip_by_global_norm calls it
        _replaced.wrap(tf.linalg, "global_norm", _over_stages)
        _replaced.wrap(base_optimizer, "global_norm", _over_stages)
    _stages.append((tuple(tuple(v.shape) for v in variables), stages))


def forget_stages() -> None:
    """Take global norms as TensorFlow does again."""
    _stages.clear()
    _replaced.close()


def _over_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    def global_norm(values: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        values = list(values)
        stages = _stages_of(values)
        if stages is None:
            return original(values, *args, **kwargs)
        mine = original(values, *args, **kwargs)
        total = _sum(tf.square(tf.cast(mine, tf.float64)), stages)
        return tf.cast(tf.sqrt(total), mine.dtype)

    return global_norm


def _stages_of(values: Sequence[Any]) -> World | None:
    """The stages that a list is spread over; None: it is whole.

    Raises:
        ModelError: it could be a part of a stage's gradients, or not.
    """
    shapes = [None if v is None else tuple(v.shape) for v in values]
    for known, stages in _stages:
        pairs = zip(shapes, known, strict=False)
        if len(shapes) == len(known) and all(a is None or a == b for a, b in pairs):
            return stages
    present = Counter(shape for shape in shapes if shape is not None)
    for known, _ in _stages:
        some, more = not present - Counter(known), not Counter(known) - present
        if some or more:
            raise ModelError(
                f"the global norm of {len(shapes)} tensors was asked for, which have the shapes of "
                f"{'some' if some else 'all'} of the {len(known)} variables that this stage of a "
                f"DistributedModel holds{'' if some else ', and others'}. Over one process it "
                "would be wrong: take the norm of the gradients of all model.trainable_variables, "
                "in order, and of nothing else"
            )
    return None


def _sum(value: tf.Tensor, stages: World) -> tf.Tensor:
    def reduce(part: Any) -> Any:
        return tf.constant(
            stages.oob_allreduce(np.asarray(part), "sum", "global norm of gradients over stages")
        )

    if tf.executing_eagerly():
        return reduce(value)
    graph = tf.compat.v1.get_default_graph()
    before = _last.get(graph)
    with tf.control_dependencies([] if before is None else [before]):
        total = tf.py_function(reduce, [value], tf.float64)
    total.set_shape([])
    _last[graph] = total
    return total
