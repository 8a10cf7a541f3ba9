"""Batches cut into microbatches, each with its weight in the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.data.local_batch import bounds, count_rows, require_examples
from ktrainer.errors import DataError
from ktrainer.steps.program_interface import LocalBatchLike

_ONE_MICROBATCH = "Set backend.microbatches=1, or backend=local"


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch that goes through the pipeline as one.

    Attributes:
        data: nested arrays: x, or (x, y), or (x, y, sample_weight).
        rows: examples in it.
        weight: its part of the update's examples; 0 for padding.
    """

    data: Any
    rows: int
    weight: float

    @cached_property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes and types of its leaves: what a stage is compiled for."""
        return shapes_of(self.data)


def cut_batches(
    batches: Sequence[LocalBatchLike], count: int, adapt: Callable[[Any], Any] = lambda data: data
) -> list[Microbatch]:
    """The microbatches of an update.

    Args:
        batches: this replica's local batches; gradients of several accumulate.
        count: microbatches a batch; one of fewer rows gives one a row. They differ in size by one
            row at most, the larger ones first.
        adapt: gives the data of a batch the dimensions that the model was cut for.

    Raises:
        DataError: sparse or ragged tensors, or arrays of different lengths, which cannot be cut.
    """
    examples = max(sum(local.global_examples for local in batches), 1)
    result = []
    for local in batches:
        rows = _rows(local.batch)
        parts = min(count, rows)
        if count > 1:
            require_examples(local.batch, 0, count, _ONE_MICROBATCH)
        batch = adapt(keras.tree.map_structure(_sliceable, local.batch))
        for part in range(parts):
            start, stop = bounds(rows, part, parts)
            data = batch  # as it is: one microbatch may have arrays with different first axes
            if parts > 1:
                data = keras.tree.map_structure(
                    lambda x, a=start, b=stop: None if x is None else x[a:b], batch
                )
            weight = (stop - start) / examples if local.examples else 0.0
            result.append(Microbatch(data, stop - start, weight))
    return result


def leaves(data: Any) -> list[Any]:
    """The arrays of nested data, in order, without None."""
    return [x for x in keras.tree.flatten(data) if x is not None]


def shapes_of(data: Any) -> tuple[Any, ...]:
    """Shapes and types of the leaves of arrays, tensors or specs."""
    return tuple((tuple(x.shape), np.dtype(_dtype(x)).name) for x in leaves(data))


def with_leaves(structure: Any, values: Sequence[Any]) -> Any:
    """`structure` with `values` in the places of its leaves."""
    rest = iter(values)
    return keras.tree.map_structure(lambda x: None if x is None else next(rest), structure)


def specs_of(microbatch: Microbatch) -> Any:
    """Nested static `tf.TensorSpec` of a microbatch."""

    def spec(x: Any) -> Any:
        return None if x is None else tf.TensorSpec(tuple(x.shape), x.dtype)

    return keras.tree.map_structure(spec, microbatch.data)


def _rows(batch: Any) -> int:
    for leaf in leaves(batch):
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            raise DataError(
                f"a pipeline cannot cut {type(leaf).__name__} into microbatches; make it dense, "
                "with tf.sparse.to_dense or `.to_tensor()`, in the input pipeline"
            )
    return count_rows(batch)


def _sliceable(x: Any) -> Any:
    """A tensor of numbers as an array, where that is no copy: slices of arrays are views, and take
    a hundredth of the time."""
    if tf.is_tensor(x) and "CPU" in x.backing_device and x.dtype != tf.string:
        return np.asarray(x)
    return x


def _dtype(x: Any) -> Any:
    return x.dtype.as_numpy_dtype if isinstance(x.dtype, tf.DType) else x.dtype
