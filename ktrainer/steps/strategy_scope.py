"""Leave an active `tf.distribute` scope during a call of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import tensorflow as tf
from tensorflow.python.framework.ops import get_default_graph


@contextmanager
def outside_strategy_scope(device: bool = False) -> Iterator[None]:
    """Leave the distribution strategy that is in scope, if any, and come back to it.

    In its scope metrics, optimizers and steps would make variables of the strategy, which nothing
    else can assign.

    Args:
        device: leave the `tf.device(...)` that is in scope too; a strategy's is left with it.
    """
    # TensorFlow keeps both of these by thread; it saves and restores them itself for functions.
    graph = get_default_graph()
    strategies, creators = graph._distribution_strategy_stack, graph._variable_creator_stack
    device = device or bool(strategies)
    graph._distribution_strategy_stack = []
    if strategies:
        graph._variable_creator_stack = []
    try:
        # Outside of functions tf.device("") means the first CPU: steps would not be on the GPU.
        with tf.device(None) if device else nullcontext():
            yield
    finally:
        graph._distribution_strategy_stack = strategies
        graph._variable_creator_stack = creators
