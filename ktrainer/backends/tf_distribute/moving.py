"""A model's variables into a strategy; out of it again, see `ktrainer.steps.strategy_variables`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from ktrainer.steps.strategy_variables import (
    forget_functions,
    is_inside,
    optimizers_follow,
    remake_variables,
    strategy_of,
    variables_of,
)

Synchronization, Aggregation = tf.VariableSynchronization, tf.VariableAggregation


@contextmanager
def scope_of(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()`, in which statistics and seed generators can be made too.

    Keras gives variables that are not trained no aggregation, without which a strategy refuses to
    assign them.
    """
    with strategy.scope(), tf.variable_creator_scope(_aggregated):
        yield


def _let_python_read() -> None:
    """Give TensorFlow's distributed variables `float()` and `int()`, which its others have.

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

    Those that are there already stay. Metrics stay outside: each process adds up its own.
    """
    into = [v for v in variables_of(model) if not is_inside(v, strategy)]
    out = [v for v in model.metrics_variables if strategy_of(v) is not None]
    values = [v.numpy() for v in into]  # read outside of the scope: they may be in another one
    with optimizers_follow(model, strategy):
        with scope_of(strategy):
            remake_variables(into, values)
        remake_variables(out, [v.numpy() for v in out])
    if into or out:
        forget_functions(model)
