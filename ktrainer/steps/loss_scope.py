"""Losses of the whole batch: `trainer.loss_scope=global`.

The outputs, targets and weights of all ranks are gathered before `compute_loss` runs, which then
is the same on every rank, random numbers included, as if there were one. So each rank knows the
gradient of its own rows, and the backward pass communicates nothing. What `compute_loss` is given
as `x` is gathered only where the model has a `compute_loss` of its own; Keras' does not look at it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask

from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced_in
from ktrainer.steps.all_gather import exchange_row_counts, gather_rows
from ktrainer.steps.assertions import assert_in_graph
from ktrainer.steps.step_context import GatheredRows, StepContext
from ktrainer.steps.step_options import StepOptions


def explain_coupled_call(split: str, place: str = "it") -> str:
    """The warning of a model whose own `call` couples examples.

    Args:
        split: into what a batch is split.
        place: where it couples them, if known.
    """
    return (
        f"this model does not compute as in one process: what {place} computes for an example "
        f"depends on the others in the batch, and an update is split into {split}, each of which "
        "sees only its own examples. No setting makes that equal; look in `call` for a product or "
        "a sum over the first axis, and compute each example from its own inputs, or, outside of "
        "pipelines, from those of all ranks with ktrainer.all_gather."
    )


def refuse_xla(options: StepOptions, collectives: GradientCollectives | None) -> None:
    """Refuse losses of the whole batch in steps that cannot gather it.

    Raises:
        ModelError: the steps are compiled with XLA, on several ranks.
    """
    if options.loss_scope == "global" and options.xla and collectives is not None:
        raise ModelError(
            "trainer.loss_scope=global gathers the outputs of all ranks inside of the step, as "
            "many rows as they have, and XLA compiles for a known number; set trainer.xla=false."
        )


@contextmanager
def gather_loss_inputs(context: StepContext, model: keras.Model, scope: str) -> Iterator[None]:
    """Have `compute_loss` see the rows of all ranks; a step is traced inside.

    Args:
        scope: "global", or "local", which changes nothing.
    """
    if scope == "local":
        yield
        return
    models = [m for m in model._flatten_layers() if isinstance(m, keras.Model)]
    classes = {cls: None for m in models for cls in type(m).__mro__ if "compute_loss" in vars(cls)}
    name = "compute_loss"
    with replaced_in(context, [(c, name, _on_all_rows(context, vars(c)[name])) for c in classes]):
        yield


def _on_all_rows(context: StepContext, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    # Keras' own does not use `x`.
    unused = ("x",) if original.__module__.startswith("keras.") else ()

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.in_global_loss or context.collectives is None:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        names = [n for n in given.arguments if n not in ("self", "training", *unused)]
        gathered = _gathered(context, [given.arguments[name] for name in names])
        given.arguments.update(zip(names, gathered, strict=True))
        with _same_on_all_ranks(context):
            loss = original(*given.args, **given.kwargs)
        if context.gathered and loss.shape.rank != 0:
            total = tf.shape(loss, out_type=tf.int64)[0]
            weight = context.gathered[0].weight
            context.gathered.append(GatheredRows(-tf.ones_like(total), total, weight, views=False))
        return loss

    return compute_loss


@contextmanager
def _same_on_all_ranks(context: StepContext) -> Iterator[None]:
    """Compute what all ranks compute alike: the same random numbers, sums and means unsplit."""
    rank, context.rank, context.in_global_loss = context.rank, 0, True
    try:
        yield
    finally:
        context.rank, context.in_global_loss = rank, False


def _gathered(context: StepContext, structure: Any) -> Any:
    """A structure whose tensors over examples have the rows of all ranks, masks included."""
    found: dict[int, Any] = {}
    for leaf in keras.tree.flatten(structure):
        for tensor in (leaf, get_keras_mask(leaf)):
            if tf.is_tensor(tensor) and context.is_over_examples(tensor):
                found[id(tensor)] = tensor
    tensors = list(found.values())
    if not tensors:
        return structure
    rows = exchange_row_counts(
        context, [_of_batch(context, tensor) for tensor in tensors], views=False
    )
    every = {
        id(tensor): gather_rows(context, tensor, place, same_loss=True)
        for tensor, place in zip(tensors, rows, strict=True)
    }

    def replaced(leaf: Any) -> Any:
        whole = every.get(id(leaf), leaf)
        mask = get_keras_mask(leaf)
        if whole is not leaf and mask is not None:
            set_keras_mask(whole, every.get(id(mask), mask))
        return whole

    return keras.tree.map_structure(replaced, structure)


def _of_batch(context: StepContext, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor`, which must have a row for each example: others' order would not be that of one
    process, in which all first views come before all second ones, say."""
    if context.rows is None:
        return tensor
    rows = tf.shape(tensor, out_type=tf.int64)[0]
    check = assert_in_graph(
        rows == tf.cast(context.rows, tf.int64),
        "trainer.loss_scope=global gathers the outputs, targets and weights of compute_loss, which "
        "must have one row for each example. Stack several views of an example on another axis, "
        "return them as several outputs, or use ktrainer.all_gather. Rows and examples:",
        rows,
        context.rows,
    )
    with tf.control_dependencies(check):
        return tf.identity(tensor)
