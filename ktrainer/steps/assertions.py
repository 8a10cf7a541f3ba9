"""Conditions that are known only when a compiled step runs, and the errors they end in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ktrainer.errors import ModelError

_CHECK = "ktrainer: "  # marks our own checks among TensorFlow's


def assert_in_graph(condition: tf.Tensor, message: str, *numbers: Any) -> list[Any]:
    """Have a step fail unless `condition` is true, which is known only when it runs.

    Args:
        message: without brackets and quotation marks.
        numbers: tensors to be printed after it.

    Returns:
        The operations that others must wait for.
    """
    check = tf.debugging.Assert(condition, [_CHECK + message, *numbers], summarize=-1)
    return [] if check is None else [check]


@contextmanager
def explain_assertions() -> Iterator[None]:
    """Turn failures of `assert_in_graph` into errors of this package; steps run inside.

    Raises:
        ModelError: one has failed.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(_CHECK + r"([^]\']*)[]\']?(.*)", str(error.message))
        if found is None:
            raise
        numbers = re.sub(r"[^-0-9 ]", " ", found[2])
        raise ModelError(" ".join(f"{found[1]} {numbers}".split())) from error
