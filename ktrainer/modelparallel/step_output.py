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

    def reduce_sum(self) -> tf.Tensor:
        """Sum over microbatches, element by element."""
        return self._total(self._tensors("reduce_sum"))

    def reduce_mean(self) -> tf.Tensor:
        """Mean over microbatches, element by element."""
        tensors = self._tensors("reduce_mean")
        return self._total(tensors) / tf.cast(len(tensors), tensors[0].dtype)

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
        """Mean over microbatches, added up one after the other: for gradients. None if none of
        them has one.

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
        var.assign(mean)
        return var

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"

    def _tensors(self, method: str) -> list[Any]:
        if any(value is None for value in self._outputs):
            raise ModelError(
                f"StepOutput.{method}: the step returned None, such as the gradient of a variable "
                "that the loss does not depend on; leave that out before it is returned"
            )
        return [tf.convert_to_tensor(value) for value in self._outputs]

    @staticmethod
    def _total(tensors: Sequence[Any]) -> Any:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total
