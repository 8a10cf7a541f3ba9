"""Gradients of variables that several partitions hold: tied weights, layers called twice.

Every holder ends with the same bits: the first one adds up what all of them have, in the order
of partitions, and gives the sum to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.post import Post
from ktrainer.backends.pipeline.sums import GradientSums

Slices = dict[int, list[Any]]  # values and indices in turn, by the variable's `id()`


class SharedGradients:
    """Sums gradients over the partitions that hold a variable.

    Args:
        variables: trained ones that this and other partitions hold, in the model's order.
        holders: the partitions of each variable, by `id()`.
        sums: of dense gradients, in this process.
        post: to the other partitions.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        holders: Mapping[int, Sequence[int]],
        sums: GradientSums,
        post: Post,
    ) -> None:
        self.variables, self.holders, self.sums, self.post = list(variables), holders, sums, post

    def __call__(self, slices: Slices) -> None:
        """Sum, in place: both the dense sums and `slices`."""
        here = self.post.world.rank
        for variable in self.variables:
            first, *others = self.holders[id(variable)]
            what = f"the gradient of {variable.path}"
            mine = self._take(variable, slices)
            if here == first:
                total = _sum(variable, [mine, *(self.post.hear(p, what) for p in others)])
                for partition in others:
                    self.post.tell(total, partition, what)
            else:
                self.post.tell(mine, first, what)
                total = self.post.hear(first, what)
            self._put(variable, slices, total)

    def _take(self, variable: Any, slices: Slices) -> Any:
        """This partition's gradient: an array, (values, indices), or None."""
        pairs = slices.pop(id(variable), None)
        if self.sums.has(variable):
            return self.sums.of(variable).numpy()
        if pairs is None:
            return None
        return np.concatenate(pairs[0::2]), np.concatenate(pairs[1::2])

    def _put(self, variable: Any, slices: Slices, total: Any) -> None:
        if isinstance(total, tuple):
            slices[id(variable)] = [tf.convert_to_tensor(part) for part in total]
        elif total is not None:
            self.sums.put(variable, total)


def densify(variable: Any, slices: Slices, sums: GradientSums) -> None:
    """Where one stage has slices and another in the same process a dense gradient: one sum."""
    if sums.has(variable) and id(variable) in slices:
        gradient = tf.IndexedSlices(*joined(slices.pop(id(variable))), variable.shape)
        sums.of(variable).assign_add(tf.convert_to_tensor(gradient))


def joined(pairs: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """The slices of all microbatches as one: repeated indices stay apart, because Keras'
    adaptive optimizers square each slice on its own."""
    return tf.concat(list(pairs[0::2]), 0), tf.concat(list(pairs[1::2]), 0)


def _sum(variable: Any, gradients: Sequence[Any]) -> Any:
    """The sum: slices joined if there is nothing else, else a dense array."""
    present = [g for g in gradients if g is not None]
    if not present:
        return None
    if all(isinstance(g, tuple) for g in present):
        return np.concatenate([g[0] for g in present]), np.concatenate([g[1] for g in present])
    total = np.zeros(variable.shape, variable.dtype)
    for gradient in present:
        if isinstance(gradient, tuple):
            np.add.at(total, gradient[1], gradient[0])
        else:
            total += gradient
    return total
