"""Bytes of gradients that a process sends in an update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ktrainer.distributed.collectives import wire_type
from ktrainer.steps.powersgd import is_compressed, matrix_shape


def sent_bytes(variables: Iterable[Any], size: int, wire: str, low_rank: int | None) -> int:
    """Bytes of dense gradients that each rank sends, and receives, in one sum over all.

    Of what is summed that is 2 (size - 1) / size, the least with which all ranks get all sums.

    Args:
        variables: those of the gradients.
        size: how many ranks there are.
        wire: none, fp16 or bf16.
        low_rank: that of PowerSGD; None without it.
    """
    total = sum(_summed_bytes(variable, wire, low_rank) for variable in variables)
    return round(total * 2 * (size - 1) / size)


def dense_variables(
    model: keras.Model, variables: Iterable[Any], sparse_as_dense: bool
) -> list[Any]:
    """Those of some variables whose gradients are sent whole, not as the rows of an embedding that
    were looked up."""
    layers = [] if sparse_as_dense else model._flatten_layers()
    tables = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    sparse = {id(v) for table in tables for v in table.trainable_variables}
    return [v for v in variables if id(v) not in sparse]


def _summed_bytes(variable: Any, wire: str, low_rank: int | None) -> int:
    dtype = tf.as_dtype(variable.dtype)
    if low_rank is not None and is_compressed(variable.shape, low_rank):
        return sum(matrix_shape(variable.shape)) * low_rank * max(4, int(dtype.size))
    narrow = wire_type(dtype, wire)
    return math.prod(variable.shape) * int((narrow or dtype).size)
