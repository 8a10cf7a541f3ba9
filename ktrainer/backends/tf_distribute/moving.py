"""A model's variables into a strategy, and out again, in place.

A Keras variable is a wrapper; `tf.distribute` is about the `tf.Variable` inside it. So a model
that was made, compiled and trained anywhere moves into a strategy by giving each of its wrappers
a new inside, made under the strategy's scope with the same value. Layers, optimizers and user
code, which hold wrappers, notice nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from ktrainer.steps import optimizers_of

_moves = 0  # of all models: they may share variables

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
    out = [v for v in model.metrics_variables if is_inside(v, strategy)]
    values = [v.numpy() for v in into]  # read outside of the scope: they may be in another one
    with _optimizers_follow(model, strategy):
        with scope_of(strategy):
            _renew(into, values)
        _renew(out, [v.numpy() for v in out])
    if into or out:
        _forget_functions(model)


def move_out(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Make ordinary variables of those that are in `strategy`, with their values."""
    out = [v for v in variables_of(model) if is_inside(v, strategy)]
    with _optimizers_follow(model, tf.distribute.get_strategy()):
        _renew(out, [v.numpy() for v in out])
    if out:
        _forget_functions(model)


def generation() -> int:
    """How often variables have been moved: what was compiled before may hold old ones."""
    return _moves


def variables_of(model: keras.Model) -> list[Any]:
    """The variables of `model` and its optimizers, without those of metrics, each once."""
    metrics = {id(v) for v in model.metrics_variables}
    found = [*model.variables, *(v for o in _all_optimizers(model) for v in o.variables)]
    return list({id(v): v for v in found if id(v) not in metrics}.values())


def is_inside(variable: Any, strategy: tf.distribute.Strategy) -> bool:
    """Whether the `tf.Variable` in a Keras variable was made under `strategy`."""
    return getattr(variable._value, "_distribute_strategy", None) is strategy


def _renew(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        # Of a weight that is frozen just now, too, a tape must see the reads when it no longer is.
        now, variable._trainable = variable._trainable, variable._value.trainable
        variable._value = None  # two of them at once may not fit on a device
        try:
            variable._initialize(value)
        finally:
            variable._trainable = now


def _forget_functions(model: keras.Model) -> None:
    """Have Keras compile its own `fit`, `evaluate` and `predict` anew."""
    global _moves
    _moves += 1
    for each in model._flatten_layers(include_self=True, recursive=True):
        if isinstance(each, keras.Model):
            each.train_function = each.test_function = each.predict_function = None


def _all_optimizers(model: keras.Model) -> list[Any]:
    """The optimizers of `model`, those inside of others too."""
    found = []
    for optimizer in optimizers_of(model):
        inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
        several = getattr(inner or optimizer, "_inner_optimizers", ())  # of a MultiOptimizer
        found += [optimizer, *([] if inner is None else [inner]), *several]
    return found


@contextmanager
def _optimizers_follow(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Let optimizers update under `strategy`, and find variables that are moved meanwhile again:
    they know them by the `tf.Variable` inside."""
    optimizers = _all_optimizers(model)
    variables = model.variables if optimizers else []
    before = [optimizers[0]._var_key(v) for v in variables]
    yield
    now = {key: optimizers[0]._var_key(v) for key, v in zip(before, variables, strict=True)}
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
        optimizer._exclude_from_weight_decay_cache = {}
        excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
        optimizer._exclude_from_weight_decay = {now.get(key, key) for key in excluded}
        for name in ("_trainable_variables_indices", "_var_to_optimizer_idx"):
            if places := getattr(optimizer, name, None):
                setattr(optimizer, name, {now.get(key, key): i for key, i in places.items()})
