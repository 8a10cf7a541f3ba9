"""PowerSGD: gradients sent as products of two thin matrices (Vogels, Karimireddy, Jaggi 2019).

Each gradient that is a matrix, or is one with all axes but the last taken as one, goes in two sums
over ranks. With the gradient G of a rank, its error memory E, and the basis Q of the update before:

    M = G + E                    what this rank has to send
    P = sum of M Q               n x rank numbers of each rank, then made orthonormal
    Q = sum of R, R = M' P       m x rank numbers
    P Q' is applied              the same on all ranks
    E = M - P R'                 what of this rank was not sent is sent later

All that is sent is linear in M, so only the sum of E over ranks matters: it can be dealt to another
number of ranks. Of an update that is skipped, E and Q stay as they were; its gradient is dropped.

Vectors, slices of embeddings, and matrices whose factors have over half of their numbers are sent
as they are.

All ranks must get the same bits, whatever their processors and numbers of threads. TensorFlow's QR
on the CPU, and its product of float64, give the same on all; its product of float32 does not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ktrainer.distributed.collectives import Gradient, GradientCollectives, InOrder, weighted
from ktrainer.steps.named_variables import INTERNAL
from ktrainer.steps.reduce_gradients import reduce_gradients
from ktrainer.steps.update_guard import all_finite

_LEAST_GAIN = 2  # a matrix has so many times the numbers of its factors


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix."""
    return math.prod(shape[:-1]), shape[-1]


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Return whether a dense gradient is sent as two factors."""
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return _LEAST_GAIN * (rows + columns) * rank <= rows * columns


@dataclass(frozen=True)
class Memory:
    """State of one variable on a rank, from update to update.

    Attributes:
        error: of this rank: what was not sent yet, as a matrix, in units of the unscaled gradient.
        basis: columns that M is multiplied with; the same on all ranks.
        seed: of the columns to begin with.
    """

    error: tf.Variable
    basis: tf.Variable
    seed: int

    def fresh_basis(self) -> tf.Tensor:
        """Random columns."""
        shape, dtype = self.basis.shape, self.basis.dtype
        return tf.random.stateless_normal(shape, [self.seed, 0], dtype=dtype, alg="philox")

    def clear(self) -> None:
        """Begin again."""
        self.error.assign(tf.zeros_like(self.error))
        self.basis.assign(self.fresh_basis())

    def update(self, error: tf.Tensor, basis: tf.Tensor, applied: tf.Tensor) -> None:
        """Take over what an update has left, if it is applied.

        A column of zeros would stay so, and what it could have found would never be sent.
        """
        length = tf.norm(basis, axis=0)
        unit = tf.where(length > 0, tf.math.divide_no_nan(basis, length), self.fresh_basis())
        self.error.assign(tf.where(applied, error, self.error))
        self.basis.assign(tf.where(applied, unit, self.basis))


class PowerSgd:
    """The compression of one model's gradients.

    Args:
        model: whose variables are trained.
        rank: of the products that gradients are sent as.
    """

    def __init__(self, model: keras.Model, rank: int) -> None:
        self.rank = rank
        self.optimizer = getattr(model, "optimizer", None)
        self._model = weakref.ref(model)
        self._memories: dict[int, Memory] = {}

    @property
    def memories(self) -> dict[int, Memory]:
        """By the variable's place in `model.variables`, in that order."""
        return dict(sorted(self._memories.items()))

    def memory_at(self, place: int) -> Memory:
        """That of a variable, by its place in `model.variables`; made at its first use."""
        if place not in self._memories:
            self._memories[place] = _make_memory(self._variables()[place], self.rank, place)
        return self._memories[place]

    def _variables(self) -> list[Any]:
        model = self._model()
        return [] if model is None else model.variables

    def _chosen(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> dict[int, Memory]:
        """The memories of the gradients that are compressed, by their index."""
        places = {id(variable): place for place, variable in enumerate(self._variables())}
        return {
            k: self.memory_at(places[id(variable)])
            for k, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if id(variable) in places
            and not isinstance(gradient, tf.IndexedSlices)
            and is_compressed(variable.shape, self.rank)
        }

    def reduce(
        self,
        collectives: GradientCollectives,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        numbers: Sequence[tf.Tensor],
        weight: tf.Tensor,
        order: InOrder,
        scale: tf.Tensor | None,
    ) -> tuple[list[Gradient], list[tf.Tensor], Remainder]:
        """As `reduce_gradients`, and what is left to be sent later.

        Args:
            variables: those of the gradients.
            scale: the factor by which a LossScaleOptimizer has scaled the loss, which changes.
        """
        memories, one = self._chosen(gradients, variables), tf.ones([], tf.float64)
        others = [k for k in range(len(gradients)) if k not in memories]
        whole = [_as_matrix(gradients[k], m, weight, scale) for k, m in memories.items()]
        products = [m @ memory.basis for m, memory in zip(whole, memories.values(), strict=True)]
        frames = [_orthonormal(p) for p in collectives.reduce(products, one, order)]
        rest, numbers = reduce_gradients(
            collectives, [gradients[k] for k in others], numbers, weight, order
        )
        ours = [tf.matmul(m, p, transpose_a=True) for m, p in zip(whole, frames, strict=True)]
        bases = collectives.reduce(ours, one, order)
        reduced: list[Gradient] = list(gradients)
        for k, frame, basis in zip(memories, frames, bases, strict=True):
            total = _product(frame, basis)
            total = total if scale is None else total * tf.cast(scale, total.dtype)
            reduced[k] = tf.cast(tf.reshape(total, variables[k].shape), gradients[k].dtype)
        for k, gradient in zip(others, rest, strict=True):
            reduced[k] = gradient
        left = zip(whole, frames, ours, strict=True)
        errors = [m - tf.matmul(p, r, transpose_b=True) for m, p, r in left]
        finite = all_finite([*bases, *rest])
        return reduced, numbers, Remainder(list(memories.values()), errors, bases, finite)


@dataclass(frozen=True)
class Remainder:
    """Parts of gradients that an update leaves to be sent later.

    Attributes:
        memories: of the compressed gradients.
        errors, bases: their new values.
        finite: whether all reduced gradients are; the same on all ranks.
    """

    memories: list[Memory]
    errors: list[tf.Tensor]
    bases: list[tf.Tensor]
    finite: tf.Tensor

    def keep(self, applied: tf.Tensor) -> None:
        """Remember it, if the update is `applied`."""
        applied &= self.finite
        for memory, error, basis in zip(self.memories, self.errors, self.bases, strict=True):
            memory.update(error, basis, applied)


_of_model: weakref.WeakKeyDictionary[Any, PowerSgd] = weakref.WeakKeyDictionary()


def set_powersgd(model: keras.Model, rank: int | None) -> bool:
    """Send gradients of `model` with this rank from now on; as they are if it is None.

    What is left to be sent stays, unless the rank is another, or the model was compiled again.

    Returns:
        Whether that changes, so that steps must be traced again.
    """
    known = _of_model.get(model)
    if known is None and rank is None:
        return False
    if known is not None and (known.rank, known.optimizer) == (rank, model.optimizer):
        return False
    if rank is None:
        del _of_model[model]
    else:
        _of_model[model] = PowerSgd(model, rank)
    return True


def powersgd_of(model: Any) -> PowerSgd | None:
    """The compression of a model's gradients; None if they are sent as they are."""
    return _of_model.get(model)


def _make_memory(variable: Any, rank: int, seed: int) -> Memory:
    rows, columns = matrix_shape(variable.shape)
    wide = tf.float64 if variable.dtype == "float64" else tf.float32
    with tf.init_scope():
        error = tf.Variable(tf.zeros([rows, columns], wide), trainable=False, name=INTERNAL)
        basis = tf.Variable(tf.zeros([columns, rank], wide), trainable=False, name=INTERNAL)
        memory = Memory(error, basis, seed)
        memory.clear()
    return memory


def _as_matrix(
    gradient: tf.Tensor, memory: Memory, weight: tf.Tensor, scale: tf.Tensor | None
) -> tf.Tensor:
    """The gradient and the error of earlier updates, which this rank has to send."""
    error = memory.error
    wide = tf.reshape(tf.cast(gradient, error.dtype), error.shape)
    wide = wide if scale is None else wide / tf.cast(scale, error.dtype)
    return weighted(wide, weight) + error


def _orthonormal(columns: tf.Tensor) -> tf.Tensor:
    """Orthonormal columns that span at least those given; of zeros any."""
    with tf.device("CPU:0"):
        return tf.linalg.qr(columns).q


def _product(frame: tf.Tensor, basis: tf.Tensor) -> tf.Tensor:
    """The gradient that is applied, with the same bits on any processor."""
    wide = tf.matmul(tf.cast(frame, tf.float64), tf.cast(basis, tf.float64), transpose_b=True)
    return tf.cast(wide, frame.dtype)
