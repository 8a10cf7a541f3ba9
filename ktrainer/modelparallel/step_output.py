"""`StepOutput`: a tensor that a step returns, with its value for each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ktrainer.errors import ModelError

_METHODS = ("add_n", "accumulate_n", "variable")


class StepOutput:
    """The values of one returned tensor, by microbatch.

    Args:
        outputs: the values, in the order of microbatches.
        axis: the batch axis of the value; None: unknown.
    """

    def __init__(self, outputs: Sequence[Any], axis: int | None = 0) -> None:
        self._outputs, self._axis = list(outputs), axis

    @property
    def outputs(self) -> list[Any]:
        """The values, in the order of microbatches."""
        return list(self._outputs)

    def reduce_sum(self) -> Any:
        """Sum over microbatches, element by element; of `tf.IndexedSlices` all slices."""
        return self._total("reduce_sum", 1)

    def reduce_mean(self) -> Any:
        """Mean over microbatches, element by element; of `tf.IndexedSlices` all slices, divided by
        the number of microbatches."""
        return self._total("reduce_mean", len(self._outputs))

    def concat(self) -> tf.Tensor:
        """The values along axis 0, one after the other: those of the whole batch.

        Raises:
            ModelError: arguments of the step were split along other axes.
        """
        if self._axis is None:
            raise ModelError(
                "StepOutput.concat or merge: an argument was split along another axis than 0 "
                "(input_split_axes), so the batch axis of what the step returned is not known. "
                "Join `.outputs` along the right one: tf.concat(output.outputs, axis)"
            )
        return tf.concat(self._tensors("concat"), self._axis)

    def merge(self) -> tf.Tensor:
        """The values joined along the batch axis; numbers without one are averaged."""
        tensors = self._tensors("merge")
        return self.concat() if tensors[0].shape.rank else self.reduce_mean()

    def stack(self) -> tf.Tensor:
        """The values along a new first axis, of as many entries as there are microbatches."""
        return tf.stack(self._tensors("stack"))

    def accumulate(self, method: str = "add_n", var: Any = None) -> Any:
        """Mean over microbatches, added up one after the other: for gradients. Of
        `tf.IndexedSlices`, as an embedding has them, all slices, divided by the number of
        microbatches. None if no microbatch has a gradient.

        Args:
            method: "add_n", "accumulate_n" or "variable", which give the same here.
            var: a variable that the mean is assigned to.

        Raises:
            ModelError: another method.
        """
        if method not in _METHODS:
            raise ModelError(f"accumulate(method={method!r}): it is one of {', '.join(_METHODS)}")
        if all(value is None for value in self._outputs):
            return None  # as a tape's, which an optimizer leaves out
        mean = self.reduce_mean()
        if var is None:
            return mean
        var.assign(tf.convert_to_tensor(mean))
        return var

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"

    def _total(self, method: str, divisor: int) -> Any:
        """The sum over microbatches by `divisor`."""
        if all(isinstance(value, tf.IndexedSlices) for value in self._outputs):
            # Adam squares each slice by itself: one sum of them would give it other moments.
            values = tf.concat([g.values for g in self._outputs], 0)
            indices = tf.concat([g.indices for g in self._outputs], 0)
            mean = values / tf.cast(divisor, values.dtype)
            return tf.IndexedSlices(mean, indices, self._outputs[0].dense_shape)
        total, *rest = self._tensors(method)
        for tensor in rest:
            total = total + tensor
        return total if divisor == 1 else total / tf.cast(divisor, total.dtype)

    def _tensors(self, method: str) -> list[Any]:
        if any(value is None for value in self._outputs):
            raise ModelError(
                f"StepOutput.{method}: the step returned None, such as the gradient of a variable "
                "that the loss does not depend on; leave that out before it is returned"
            )
        return [tf.convert_to_tensor(value) for value in self._outputs]
