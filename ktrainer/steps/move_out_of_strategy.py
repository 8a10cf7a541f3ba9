"""Move a model's variables out of a `tf.distribute` strategy.

A Keras variable is a wrapper; `tf.distribute` is about the `tf.Variable` inside it. So the
variables of a model change from one strategy to another, or to none, by giving each wrapper a new
inside with the same value. Layers, optimizers and user code, which hold wrappers, notice nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ktrainer.steps.optimizers import optimizers_of

_moves = 0  # of all models: they may share variables


def unwrap_variables(model: keras.Model, strategy: tf.distribute.Strategy | None = None) -> None:
    """Make ordinary variables of those that are in `strategy`, with their values, metrics' too.

    Args:
        strategy: None: any, such as one of the user's own.
    """
    found = [*model_and_optimizer_variables(model), *model.metrics_variables]
    out = [v for v in found if strategy_of(v) is not None]
    if strategy is not None:
        out = [v for v in out if is_inside(v, strategy)]
    elif not out and all(_is_free(each) for each in _all_optimizers(model)):
        return
    with optimizers_follow(model, tf.distribute.get_strategy()):
        remake_variables(out, [v.numpy() for v in out])
    if out:
        forget_functions(model)


def generation() -> int:
    """How often variables have been moved: what was compiled before may hold old ones."""
    return _moves


def model_and_optimizer_variables(model: keras.Model) -> list[Any]:
    """The variables of `model` and its optimizers, without those of metrics, each once."""
    metrics = {id(v) for v in model.metrics_variables}
    found = [*model.variables, *(v for o in _all_optimizers(model) for v in o.variables)]
    return list({id(v): v for v in found if id(v) not in metrics}.values())


def is_inside(variable: Any, strategy: tf.distribute.Strategy) -> bool:
    """Return whether the `tf.Variable` in a Keras variable was made under `strategy`."""
    return getattr(variable._value, "_distribute_strategy", None) is strategy


def strategy_of(variable: Any) -> tf.distribute.Strategy | None:
    """The strategy under which the `tf.Variable` in a Keras variable was made, if there is one."""
    strategy = getattr(variable._value, "_distribute_strategy", None)
    return None if strategy is tf.distribute.get_strategy() else strategy


def _is_free(optimizer: Any) -> bool:
    """Return whether an optimizer makes ordinary variables."""
    return optimizer._distribution_strategy is tf.distribute.get_strategy()


def remake_variables(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Give Keras variables new insides, under the strategy in scope, with these values."""
    for variable, value in zip(variables, values, strict=True):
        # Of a weight that is frozen just now, too, a tape must see the reads when it no longer is.
        now = variable._trainable
        # Sharded variables of parameter servers do not say.
        variable._trainable = getattr(variable._value, "trainable", now)
        variable._value = None  # two of them at once may not fit on a device
        try:
            variable._initialize(value)
        finally:
            variable._trainable = now


def forget_functions(model: keras.Model) -> None:
    """Have Keras compile its own `fit`, `evaluate` and `predict` again, without a strategy."""
    global _moves
    _moves += 1
    for each in model._flatten_layers(include_self=True, recursive=True):
        if isinstance(each, keras.Model):
            each.train_function = each.test_function = each.predict_function = None
            each._distribute_strategy = None


def _all_optimizers(model: keras.Model) -> list[Any]:
    """The optimizers of `model`, those inside of others too."""
    found = []
    for optimizer in optimizers_of(model):
        inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
        several = getattr(inner or optimizer, "_inner_optimizers", ())  # of a MultiOptimizer
        found += [optimizer, *([] if inner is None else [inner]), *several]
    return found


@contextmanager
def optimizers_follow(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
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
