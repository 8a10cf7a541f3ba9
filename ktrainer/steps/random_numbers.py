"""Random numbers of a step on one of several ranks, whose generators have equal states.

Ranks, and replicas, must not draw the same numbers, or their examples would share masks and noise.
Rank 0 draws those of one process. Replacements for functions of Keras and TensorFlow; see
`steps.keras_patches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ktrainer.steps.step_context import StepContext

_RANK_STRIDE = 0x9E3779B1 - 2**32  # odd, so that all ranks' seeds differ modulo 2**32
_SEEDS = 2**31 - 1  # TensorFlow takes the seeds of operations modulo this


def next_seed(context: StepContext, original: Callable[..., Any]) -> Any:
    """The next seed of a generator of Keras."""

    def next_of_rank(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        if _is_first(context):
            return seed
        # int32 products are those modulo 2**32, for a rank that is a tensor too.
        offset = tf.cast(context.rank, tf.int32) * tf.constant(_RANK_STRIDE, tf.int32)
        return seed + tf.cast(tf.stack([offset, 0]), seed.dtype)

    return next_of_rank


def get_seed(context: StepContext, original: Callable[..., Any]) -> Any:
    """The seeds of an operation of `tf.random`, of which the second one counts operations."""

    def seeds_of_rank(op_seed: Any) -> Any:
        first, second = original(op_seed)
        # Replicas that are traced as one learn their numbers too late.
        rank = tf.get_static_value(context.rank)
        if not rank or first is None:
            return first, second
        return first, (second + int(rank) * _RANK_STRIDE) % _SEEDS or _SEEDS  # both 0: no seed

    return seeds_of_rank


def prepare_key_counter(context: StepContext, original: Callable[..., Any]) -> Any:
    """The key and counter of a draw of a `tf.random.Generator`."""

    def key_of_rank(self: Any, shape: Any) -> Any:
        key, counter = original(self, shape)
        if _is_first(context):
            return key, counter
        offset = tf.cast(context.rank, tf.int64) * tf.constant(_RANK_STRIDE, tf.int64)
        return key + tf.cast(offset, key.dtype), counter

    return key_of_rank


def _is_first(context: StepContext) -> bool:
    return isinstance(context.rank, int) and context.rank == 0
