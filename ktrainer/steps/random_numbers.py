"""Random numbers of a step on one of several ranks, whose generators have equal states.

Ranks, and replicas, must not draw the same numbers for their examples, which would share masks and
noise; nor must layers on different stages of a pipeline. Rank 0 draws those of one process, on
stage 0. Replacements for functions of Keras and TensorFlow; see
`steps.keras_patches`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import random_seed

from ktrainer.steps.clipped_gradients import IN_LOOP
from ktrainer.steps.step_context import StepContext

_RANK_STRIDE = 0x9E3779B1 - 2**32  # odd, so that all ranks' seeds differ modulo 2**32
_STAGE_STRIDE = 0x45D9F3B5  # added to the other half of a seed than ranks' offsets
_OPS_OF_STAGE = 4096  # the seeds of a stage's operations, which TensorFlow counts
_STATEFUL = re.compile(
    "Random(?!.*Dataset)|TruncatedNormal|Multinomial|CandidateSampler|SampleDistorted"
)
_SEEDS = 2**31 - 1  # TensorFlow takes the seeds of operations modulo this


def next_seed(context: StepContext, original: Callable[..., Any]) -> Any:
    """The next seed of a generator of Keras."""

    def next_of_rank(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        stage = context.stage if id(self.state) in context.shared_seeds else 0
        rank = 0 if context.draws_for_batch else context.rank
        if isinstance(rank, int) and rank == 0 and not stage:
            return seed
        # int32 products are those modulo 2**32, for a rank that is a tensor too.
        offset = tf.cast(rank, tf.int32) * tf.constant(_RANK_STRIDE, tf.int32)
        # Keras takes seeds modulo 2**31 - 2.
        of_stage = stage * _STAGE_STRIDE % (2**31 - 2)
        return seed + tf.cast(tf.stack([offset, of_stage]), seed.dtype)

    return next_of_rank


def count_seeds_from(stage: int) -> None:
    """Give the operations of `tf.random` that follow in this graph, without a seed of their own,
    other seeds than those of other stages."""
    random_seed._graph_to_seed_dict[tf.compat.v1.get_default_graph()] = stage * _OPS_OF_STAGE


def draw_of_shape(context: StepContext, original: Callable[..., Any]) -> Any:
    """An operation of `tf.random` that is given the shape of what it draws."""

    def shape_of(shape: Any, parameters: Any = None, *_: Any) -> tf.TensorShape:
        static = tf.get_static_value(shape)
        if static is None:
            return tf.TensorShape(None)
        return tf.TensorShape(static).concatenate(getattr(parameters, "shape", ()))

    return _draw(context, original, shape_of)


def draw_for_rows(context: StepContext, original: Callable[..., Any]) -> Any:
    """An operation of `tf.random` that draws for each row of its input."""
    return _draw(context, original, lambda rows, *_: rows.shape)


def keras_draw_of_shape(context: StepContext, original: Callable[..., Any]) -> Any:
    """A function of `keras.random` that is given the shape of what it draws."""
    return _keras_draw(context, original, lambda shape, *_, **__: _sizes(shape))


def keras_draw_for_rows(context: StepContext, original: Callable[..., Any]) -> Any:
    """`keras.random.categorical`, which draws a number of classes for each row of its input."""

    def sizes(logits: Any, num_samples: Any, *_: Any, **__: Any) -> list[int | None]:
        return [*_sizes_of(logits)[:1], *_sizes([num_samples])]

    return _keras_draw(context, original, sizes)


def keras_shuffle(context: StepContext, original: Callable[..., Any]) -> Any:
    """`keras.random.shuffle`, which draws an order of one axis."""

    def size(x: Any, axis: int = 0, *_: Any, **__: Any) -> list[int | None]:
        return _sizes_of(x)[axis:][:1] or [None]

    return _keras_draw(context, original, size)


def keras_dropout(context: StepContext, original: Callable[..., Any]) -> Any:
    """`keras.random.dropout`, which draws for each element of its input, or of its noise shape."""

    def sizes(
        inputs: Any, rate: Any, noise_shape: Any = None, *_: Any, **__: Any
    ) -> list[int | None]:
        own = _sizes_of(inputs)
        if noise_shape is None:
            return own
        given = _sizes(noise_shape)
        if len(given) != len(own):
            return given
        return [a if b is None else b for a, b in zip(own, given, strict=True)]

    return _keras_draw(context, original, sizes)


def _keras_draw(
    context: StepContext, original: Callable[..., Any], sizes: Callable[..., list[int | None]]
) -> Any:
    """A draw for examples differs between ranks; one that cannot be for examples is of the batch,
    and does not. Where shapes are static, any that the rows divide may be for examples."""

    def draw(*args: Any, **named: Any) -> Any:
        rows = context.rows if context.rows is not None else context.rows_of_draws
        whole = tf.get_static_value(rows) if rows is not None else None
        may_be = any(n is None or (whole and n % whole == 0) for n in sizes(*args, **named))
        may_be = may_be or context.graph == IN_LOOP  # perhaps of single examples
        before = context.draws_for_batch
        context.draws_for_batch = not may_be and not context.predicts
        try:
            return original(*args, **named)
        finally:
            context.draws_for_batch = before

    return draw


def _sizes(shape: Any) -> list[int | None]:
    """The sizes of dimensions, None where they are unknown while the step is traced."""
    if tf.is_tensor(shape):
        shape = tf.get_static_value(shape)
    if shape is None or (isinstance(shape, tf.TensorShape) and shape.rank is None):
        return [None]
    return [tf.get_static_value(n) for n in (shape if isinstance(shape, Iterable) else [shape])]


def _sizes_of(tensor: Any) -> list[int | None]:
    shape = getattr(tensor, "shape", None)
    return _sizes(tf.TensorShape(tf.convert_to_tensor(tensor).shape if shape is None else shape))


def _draw(
    context: StepContext, original: Callable[..., Any], shape_of: Callable[..., tf.TensorShape]
) -> Any:
    """A draw for examples differs between ranks; any other is one of the batch, and does not."""

    def draw(*args: Any, seed2: int | None = None, **named: Any) -> Any:
        # Replicas that are traced as one learn their numbers too late.
        rank = tf.get_static_value(context.rank)
        if rank and seed2 is not None and _is_for_examples(context, shape_of(*args)):
            seed2 = (seed2 + int(rank) * _RANK_STRIDE) % _SEEDS or _SEEDS  # both 0: no seed
        return original(*args, seed2=seed2, **named)

    return draw


def _is_for_examples(context: StepContext, shape: tf.TensorShape) -> bool:
    """Whether a shape depends on the rows of the batch, whose number is static in few steps."""
    if shape.rank is None or (shape.rank and shape[0] is None):
        return True
    rows = context.rows if context.rows is not None else context.rows_of_draws
    return bool(shape.rank) and rows is not None and shape[0] == tf.get_static_value(rows)


def draws_by_count(graph: Any) -> bool:
    """Return whether operations of a graph, or of the functions that it calls, are random and
    stateful, as `tf.random.normal` is: their numbers depend on how often they ran in it."""
    graph = graph.as_graph_def()
    functions = [node for function in graph.library.function for node in function.node_def]
    return any(
        _STATEFUL.search(node.op) and "Stateless" not in node.op
        for node in [*graph.node, *functions]
    )
