"""Where the dense gradients of a process's variables are added up over microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class GradientSums:
    """One sum for each variable, made at first use; all are empty when a step begins.

    An empty sum is overwritten by the first gradient, not added to: that saves setting all of
    them to zero, in time and in memory.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tf.Variable] = {}
        self._filled: set[int] = set()

    def begin(self) -> None:
        """Empty all sums."""
        self._filled.clear()

    def of(self, variable: Any) -> tf.Variable:
        """The sum for `variable`, of its shape and type, whether filled or not."""
        if id(variable) not in self._sums:
            with tf.init_scope():
                self._sums[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape, variable.dtype), trainable=False
                )
        return self._sums[id(variable)]

    def has(self, variable: Any) -> bool:
        """Whether there is a dense gradient of `variable` in this step."""
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
