"""TensorFlow's AutoGraph, which rewrites the Python functions that a `tf.function` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def exclude_from_autograph() -> None:
    """Have AutoGraph call this package's functions as they are.

    It would rewrite each of them and compile it anew: two seconds at the start of a loop of a
    user's own that averages gradients. None of ours branches on tensors.
    """
    from tensorflow.python.autograph.core import config

    ours = config.DoNotConvert("ktrainer")
    if not any(str(rule) == str(ours) for rule in config.CONVERSION_RULES):
        config.CONVERSION_RULES = (ours, *config.CONVERSION_RULES)


def rewritten_by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a user's own, which one of this package's calls, as AutoGraph would have it
    where this is called: rewritten inside of a `tf.function`, else as it is."""
    import tensorflow as tf

    status = tf.__internal__.autograph.control_status_ctx()
    if status.status.name != "ENABLED":
        return function
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(function, status)
    return converted
