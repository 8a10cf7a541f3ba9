"""Rows of all ranks in one tensor, inside of a step: for losses that couple examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from ktrainer.distributed import current_world
from ktrainer.errors import ModelError
from ktrainer.steps.assertions import assert_in_graph
from ktrainer.steps.step_context import GatheredRows, StepContext, current_step

_WHERE = (
    "Call it in train_step, test_step, compute_loss or a layer's call, while `fit` or `evaluate` "
    "runs the step; `predict` gathers nothing."
)


def all_gather(tensor: Any) -> Any:
    """The rows of all ranks, or replicas, in their order; in one process `tensor` itself.

    Call it inside of a step, on every rank alike. The result depends on the rows of every rank,
    and so do gradients: a loss of it is differentiated with respect to all of them, whether all
    ranks compute the same loss of the gathered rows, or each one that of its own rows against all
    rows. Losses that are means are exact as they are. With `trainer.accumulate` it gathers the
    rows of each accumulated batch.

    Args:
        tensor: of floats, integers or booleans, its first axis the examples. Ranks may have
            different numbers of rows, or none; the other dimensions are equal.

    Returns:
        A tensor of the same dtype, with the rows of rank 0 first. Integers and booleans arrive
        exactly as they are, and have no gradient.

    Raises:
        ModelError: it is called outside of a step although there are several ranks; the step is
            compiled with XLA or for a TPU; the tensor has no rows that could be gathered.
    """
    if isinstance(tensor, keras.KerasTensor) or in_symbolic_scope():
        return tensor  # a model is built: only shapes count
    context = current_step()
    if context is None or context.predicts:
        _check_alone()
        return tensor
    if context.split:
        raise ModelError(
            "ktrainer.all_gather cannot gather the rows of a pipeline's microbatches, which pass "
            "through the model one after another. Set trainer.loss_scope=global, return what the "
            "loss needs as outputs of the model, and compute the loss in compute_loss or a "
            "compiled loss."
        )
    if context.collectives is None:
        return tensor
    tensor = tf.convert_to_tensor(tensor)
    if context.in_global_loss:
        return tensor  # of all ranks already
    (rows,) = exchange_row_counts(context, [tensor])
    gathered = gather_rows(context, tensor, rows)
    if context.sums and context.flow:
        context.flow.end(gathered)  # gradients of all ranks, which a loop may reduce by itself
    return gathered


@dataclass(frozen=True)
class RowOffset:
    """The place of this rank's rows among those of all.

    Attributes:
        first: int64 scalar; the place of the first one.
        gathered: how many there are.
        shape: int64 vector; the dimensions but the first, which are the same on all ranks.
    """

    first: tf.Tensor
    gathered: GatheredRows
    shape: tf.Tensor


def exchange_row_counts(
    context: StepContext, tensors: Sequence[tf.Tensor], views: bool = True
) -> list[RowOffset]:
    """How many rows all ranks have of some tensors, in one message.

    Args:
        tensors: this rank's rows, or padding.
        views: as in `GatheredRows`.

    Raises:
        ModelError: the step is compiled with XLA or for a TPU, or a tensor has no rows.
    """
    assert context.collectives is not None
    _check_gatherable(context, tensors)
    rank, size = context.collectives.rank_and_size(context.rank)
    shapes = tf.concat([tf.shape(tensor, out_type=tf.int64) for tensor in tensors], 0)
    shapes *= tf.cast(context.weight > 0, tf.int64)
    numbers = tf.concat([tf.cast(shapes, tf.float64), tf.reshape(context.weight, [1])], 0)
    ours = tf.one_hot(rank, size, dtype=tf.float64)[:, None] * numbers[None, :]
    every = tf.reshape(
        context.collectives.sum(tf.reshape(ours, [-1]), context.order), tf.shape(ours)
    )
    weight = tf.reduce_sum(every[:, -1])
    every = tf.cast(every, tf.int64)
    found, column = [], 0
    for tensor in tensors:
        rows = every[:, column]
        dims = every[:, column + 1 : column + tensor.shape.rank]
        column += tensor.shape.rank
        with tf.control_dependencies(_same_shapes(rows, dims)):
            gathered = GatheredRows(tf.identity(rows[rank]), tf.reduce_sum(rows), weight, views)
        context.gathered.append(gathered)
        found.append(RowOffset(tf.reduce_sum(rows[:rank]), gathered, tf.reduce_max(dims, 0)))
    return found


def gather_rows(
    context: StepContext, tensor: tf.Tensor, rows: RowOffset, same_loss: bool = False
) -> tf.Tensor:
    """The rows of all ranks in one tensor.

    Args:
        tensor: this rank's rows, or padding.
        rows: what `exchange_row_counts` has found of it.
        same_loss: all ranks differentiate the same loss of what is gathered, so that each of them
            knows the gradient of its own rows by itself.
    """
    own, total = rows.gathered.own, rows.gathered.total
    wire = tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.int64)
    wire = tf.reshape(wire[:own], tf.concat([[own], rows.shape], 0))
    after = total - own - rows.first
    padding = tf.concat([[[rows.first, after]], tf.zeros([tf.size(rows.shape), 2], tf.int64)], 0)
    placed = tf.pad(wire, padding)
    if not tensor.dtype.is_floating:
        assert context.collectives is not None
        summed = context.collectives.sum(placed, context.order)
    else:
        summed = context.across(placed, rows.gathered.weight if same_loss else None)
    return tf.ensure_shape(tf.cast(summed, tensor.dtype), [None, *tensor.shape[1:]])


def _check_gatherable(context: StepContext, tensors: Sequence[tf.Tensor]) -> None:
    context.refuse_xla("it gathers the rows of all ranks")
    if tf.is_tensor(context.rank):
        raise ModelError(
            "the rows of all replicas cannot be gathered within a step on a TPU, whose compiler "
            "must know their number: choose strategy=mirrored."
        )
    for tensor in tensors:
        _check_rows(tensor)


def _check_rows(tensor: tf.Tensor) -> None:
    numbers = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    if numbers and tensor.shape.rank:
        return
    raise ModelError(
        f"a tensor of shape {tensor.shape} and type {tensor.dtype.name} cannot be gathered from "
        "all ranks: its first axis must be the examples, its number of axes be known, and its "
        "elements be floats, integers or booleans."
    )


def _same_shapes(rows: tf.Tensor, dims: tf.Tensor) -> list[Any]:
    same = tf.reduce_all(dims == tf.reduce_max(dims, 0), axis=1) | (rows == 0)
    return assert_in_graph(
        tf.reduce_all(same),
        "rows of some ranks have other dimensions than those of others, so they cannot be gathered "
        "in one tensor. Pad them to one length. Rows and dimensions, rank by rank:",
        tf.concat([rows[:, None], dims], 1),
    )


def _check_alone() -> None:
    """Refuse a call outside of a step where there are other ranks or replicas."""
    world = current_world()
    ranks = world.size if world is not None else 1
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if ranks > 1 or replicas > 1:
        several = f"{ranks} ranks" if ranks > 1 else f"{replicas} replicas"
        raise ModelError(
            f"ktrainer.all_gather was called outside of a step, with {several}: their rows are "
            "known only inside. " + _WHERE
        )
