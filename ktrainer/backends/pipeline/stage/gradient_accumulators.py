"""Sums of the dense gradients of a process's variables over microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.stage.tensor_memory import address_of, array_at


class GradientAccumulators:
    """One sum for each variable, made at first use; all are empty when a step begins.

    An empty sum is overwritten by the first gradient, not added to: that saves setting all of
    them to zero, in time and in memory.

    Attributes:
        keep_memory: sums that have been taken keep their memory. XLA needs that: for it a
            variable has one shape for good.
    """

    keep_memory = False

    def __init__(self) -> None:
        self._sums: dict[int, tf.Variable] = {}
        self._filled: set[int] = set()

    def begin(self) -> None:
        """Empty all sums."""
        self._filled.clear()

    def of(self, variable: Any) -> tf.Variable:
        """The sum for `variable`, of its type, and of its shape if it is filled."""
        if id(variable) not in self._sums:
            shape = variable.shape if self.keep_memory else [0]
            with tf.init_scope():
                self._sums[id(variable)] = tf.Variable(
                    tf.zeros(shape, variable.dtype), trainable=False, shape=tf.TensorShape(None)
                )
        return self._sums[id(variable)]

    def take(self, variable: Any) -> tf.Tensor:
        """The sum of `variable`; its memory is free once the tensor is."""
        total = self.of(variable)
        value = tf.ensure_shape(total, variable.shape)
        if not self.keep_memory:
            total.assign(tf.zeros([0], variable.dtype))
        return value

    def has(self, variable: Any) -> bool:
        """Return whether there is a dense gradient of `variable` in this step."""
        return id(variable) in self._filled

    def fill(self, variables: Iterable[Any]) -> bool:
        """Note that these variables get a gradient now.

        Returns:
            Whether their sums are all empty and the gradient is to overwrite them; otherwise
            those that are empty have been set to zero, and it is to be added.
        """
        variables = list(variables)
        empty = [v for v in variables if not self.has(v)]
        self._filled.update(map(id, empty))
        if len(empty) == len(variables):
            return True
        for variable in empty:
            self.of(variable).assign(tf.zeros(variable.shape, variable.dtype))
        return False

    def put(self, variable: Any, value: Any) -> None:
        """Set the sum of `variable`."""
        self._filled.add(id(variable))
        self.of(variable).assign(value)

    def memory(
        self, variables: Iterable[Any], others: Iterable[Any] = ()
    ) -> list[np.ndarray] | None:
        """The memory of some filled sums, flat; what is written there is in the sums.

        It may be used until a sum is next taken, added to or put.

        Args:
            others: variables whose sums, where filled, are in none of this memory.

        Returns:
            An array for each; None unless all are in the host's memory.
        """
        arrays: list[np.ndarray] = []
        seen = {address_of(self.of(v).read_value()) for v in others if self.has(v)}
        for variable in variables:
            value = self.of(variable).read_value()
            if "CPU" not in value.backing_device:
                return None
            if address_of(value) in seen:
                # TensorFlow computes equal expressions once, and both variables get that tensor.
                self.of(variable).assign(tf.raw_ops.DeepCopy(x=value))
                value = self.of(variable).read_value()
            seen.add(address_of(value))
            arrays.append(array_at(address_of(value), value))
        return arrays
