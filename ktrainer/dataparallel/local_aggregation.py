"""Gradients of several backward passes, added up before they are reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ktrainer.errors import ModelError


class LocalAggregation:
    """Sums of gradients, kept in variables of its own, which no model or checkpoint holds.

    Args:
        passes: how many gradients of each variable make an update.
        average: whether their sum is divided by `passes`.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._sums: list[tf.Variable | None] = []
        self._of: list[Any] = []  # the variables that they are of
        self._count: tf.Variable | None = None

    def add(
        self, gradients: list[Any], variables: list[Any], update: Callable[[list[Any]], None]
    ) -> None:
        """Add gradients; every so many times call `update` with their sums, and begin again.

        Raises:
            ModelError: other variables have gradients than before.
        """
        if self._count is None:
            self._of = list(variables)
            with tf.init_scope():
                self._sums = [
                    None if g is None else tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                    for g, v in zip(gradients, variables, strict=True)
                ]
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        others = list(map(id, variables)) != list(map(id, self._of))
        if others or [g is None for g in gradients] != [s is None for s in self._sums]:
            raise ModelError(
                "with backward_passes_per_step the same variables must have gradients in every "
                f"pass; {'there are others' if others else 'others have None'} now. Give each pass "
                "the same variables and losses, and each optimizer its own variables."
            )
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        count = self._count.assign_add(1)
        is_last = tf.equal(count % self._passes, 0)
        if tf.executing_eagerly():
            if is_last:
                self._take(update)
        else:
            tf.cond(is_last, lambda: self._take(update), lambda: False)

    def _take(self, update: Callable[[list[Any]], None]) -> bool:
        divisor = self._passes if self._average else 1
        taken = [None if s is None else tf.identity(s) / divisor for s in self._sums]
        update(taken)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        return True
