"""The step of a training loop of the user's own, traced as the step of one rank among others.

The convention is that of `tf.distribute`: a step gets a rank's rows of each global batch, divides
the sum of their losses by the size of the *global* batch, and gradients are summed over ranks where
an optimizer applies them. So what a rank computes is a part of a sum, with weight 1, or 0 where it
has no rows. A Keras loss that is a mean is divided by the denominator of all ranks, which makes it
such a part too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import nn_impl_distribute as nn

from ktrainer.data.local_batch import rows_in_graph
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.runtime.monkeypatching import Replacement, is_entered, replaced, replaced_in
from ktrainer.steps.assertions import assert_in_graph
from ktrainer.steps.assigned_variables import AssignedVariables
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext

_BATCH = (
    "All tensors that trainer.run is given are rows of one batch; give a step its constants "
    "otherwise: as variables, or let it use them from outside. Rows of the arguments:"
)


class LoopStep:
    """A step of the user's own on one rank, compiled.

    Args:
        step: the user's function.
        collectives: sums over ranks.
        rank: this process's number.
        on_start: called on the host whenever the step starts.

    Attributes:
        function: the compiled step.
        applies: whether a trace of it has applied an optimizer.
        needs_equal: whether ranks must begin it with the same variables: it applies one, or assigns
            to variables of TensorFlow, or adds up gradients, that are left as each rank does.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        collectives: GradientCollectives,
        rank: int,
        on_start: Callable[[], None],
    ) -> None:
        self._step = as_function(step)
        self._collectives, self._rank, self._on_start = collectives, rank, on_start
        self.applies = self.needs_equal = False
        self.function = tf.function(self._on_this_rank, autograph=False)

    def _on_this_rank(self, *args: Any) -> Any:
        context = loop_context(args, self._collectives, self._rank)
        self._count(context)
        assigned = AssignedVariables(context)
        with loop_patches(context), as_one_of_ranks(context), assigned.noted():
            result = self._step(*args)
        assigned.reduce()
        self.applies = self.applies or context.applies > 0
        self.needs_equal = self.needs_equal or self.applies or assigned.leaves
        return result

    def _count(self, context: StepContext) -> None:
        """Call `on_start` ahead of all collectives; it also keeps two steps in one function from
        running at once."""

        def start() -> np.bool_:
            self._on_start()
            return np.bool_(True)

        context.order(lambda: [tf.numpy_function(start, [], tf.bool, stateful=True)])


def as_function(step: Callable[..., Any]) -> Any:
    """A user's step as a `tf.function`, which converts its Python branches and loops."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step
    return tf.function(step, reduce_retracing=True)


def loop_context(
    args: tuple[Any, ...], collectives: GradientCollectives | None, rank: int | tf.Tensor
) -> StepContext:
    """The context of a step of the user's own that is called with `args`."""
    batched = [leaf for leaf in tf.nest.flatten(args) if _has_rows(leaf)]
    if not batched:
        return StepContext(tf.ones([], tf.float64), collectives, rank, uniform=False, sums=True)
    rows = tf.stack([rows_in_graph(leaf) for leaf in batched])
    static = batched[0].shape[0]
    agree, have_rows = tf.reduce_all(rows == rows[0]), tf.reduce_all(rows > 0)
    check = assert_in_graph(agree | have_rows, f"some arguments have no rows. {_BATCH}", rows)
    with tf.control_dependencies(check):
        weight = tf.cast(have_rows, tf.float64)
    return StepContext(
        weight,
        collectives,
        rank,
        uniform=False,  # so that each denominator is counted
        rows=rows[0] if static is None else tf.constant(static, tf.int64),
        rows_agree=agree,
        sums=True,
    )


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


@contextmanager
def loop_patches(context: Any) -> Iterator[None]:
    """Trace a step of the user's own, called inside, as that of one rank or replica.

    Args:
        context: of the step; for replicas, the one that delegates to that of each.
    """
    functions = [
        (owner, replacement.__name__, replacement(context, getattr(nn, replacement.__name__)))
        for replacement in (compute_average_loss, scale_regularization_loss)
        for owner in (tf.nn, nn)
    ]
    with keras_patches(context, None), replaced_in(context, functions):
        yield


def compute_average_loss(context: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Without a global batch size, divide by the examples of all ranks."""

    def average(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        if global_batch_size is None and context.collectives is not None:
            losses = tf.convert_to_tensor(per_example_loss)
            rows = tf.cast(tf.shape(losses)[0], tf.float64)
            global_batch_size = tf.cast(tf.round(context.denominator(rows)), tf.int64)
        return original(per_example_loss, sample_weight, global_batch_size)

    return average


def scale_regularization_loss(context: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Divide by the number of ranks that have rows: the gradients of others do not count."""

    def scale(regularization_loss: Any) -> Any:
        if context.collectives is None:
            return original(regularization_loss)
        total = tf.reduce_sum(regularization_loss)
        return context.as_mean(total / context.denominator(tf.ones([], total.dtype)))

    return scale


@contextmanager
def as_one_of_ranks(context: StepContext) -> Iterator[None]:
    """Let the default strategy of TensorFlow speak of ranks as of replicas.

    A step may ask `tf.distribute.get_strategy().num_replicas_in_sync`, or for the id and the sums
    of its `tf.distribute.get_replica_context()`. Keras' optimizers ask too, with gradients that are
    summed already, and get TensorFlow's own answer.
    """
    assert context.collectives is not None
    size, rank = context.collectives.size, context.rank
    extended = distribute_lib._DefaultDistributionExtended
    replica = distribute_lib._DefaultReplicaContext
    with (
        replaced(
            _property(context, extended, "_num_replicas_in_sync", size),
            _property(context, replica, "replica_id_in_sync_group", rank),
        ),
        replaced_in(context, [(replica, "all_reduce", _all_reduce(context, replica.all_reduce))]),
    ):
        yield


def _property(context: StepContext, owner: type, name: str, value: Any) -> Replacement:
    original = getattr(owner, name)

    def get(self: Any) -> Any:
        ours = is_entered(context) and not context.updating
        return value if ours else original.fget(self)

    return owner, name, property(get)


def _all_reduce(context: StepContext, original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if context.updating:
            return original(self, reduce_op, value, options)
        mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        size = self.num_replicas_in_sync if mean else 1

        def reduced(each: Any) -> tf.Tensor:
            total = context.sum(tf.convert_to_tensor(each))
            if context.flow:
                context.flow.end(total)
            return total / tf.cast(size, total.dtype)

        return tf.nest.map_structure(reduced, value)

    return all_reduce
