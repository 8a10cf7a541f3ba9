"""Moves a model's variables into a strategy; `steps.move_out_of_strategy` moves them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from ktrainer.steps.move_out_of_strategy import (
    forget_functions,
    is_inside,
    model_and_optimizer_variables,
    optimizers_follow,
    remake_variables,
    strategy_of,
)

Synchronization, Aggregation = tf.VariableSynchronization, tf.VariableAggregation


@contextmanager
def scope_of(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()` in which statistics and seed generators can be made too.

    Keras sets no aggregation for variables that are not trained; strategies refuse to assign such.
    """
    with strategy.scope(), tf.variable_creator_scope(_aggregated):
        yield


def _let_python_read() -> None:
    """Give TensorFlow's distributed variables `float()` and `int()`, as other variables have.

    Callbacks read `float(self.model.optimizer.learning_rate)`.
    """
    for kind in (float, int):
        name = f"__{kind.__name__}__"
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, lambda self, kind=kind: kind(self.numpy()))


_let_python_read()


def _aggregated(create: Any, **settings: Any) -> Any:
    local = settings.get("synchronization") == Synchronization.ON_READ
    none = settings.get("aggregation") in (None, Aggregation.NONE)
    if none and not local and not settings.get("trainable", True):
        floating = tf.as_dtype(settings.get("dtype") or tf.float32).is_floating
        settings["aggregation"] = Aggregation.MEAN if floating else Aggregation.ONLY_FIRST_REPLICA
    return create(**settings)


def move_in(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Move the variables of `model` and its optimizers, all built, into `strategy`.

    Variables that are inside already stay. Metrics stay outside: each process adds up its own.
    """
    into = [v for v in model_and_optimizer_variables(model) if not is_inside(v, strategy)]
    out = [v for v in model.metrics_variables if strategy_of(v) is not None]
    values = [v.numpy() for v in into]  # read outside of the scope: they may be in another one
    with optimizers_follow(model, strategy):
        with scope_of(strategy):
            remake_variables(into, values)
        remake_variables(out, [v.numpy() for v in out])
    if into or out:
        forget_functions(model)
