"""The optimizers that a model holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Every optimizer that `model` or one of its layers holds, each once, in a fixed order.

    Looks at attributes, and inside lists, tuples and dicts, as a GAN with two optimizers needs.
    A `LossScaleOptimizer` is listed without the optimizer inside it.
    """
    found: dict[int, keras.optimizers.Optimizer] = {}
    for layer in _layers(model):
        for value in _attributes(layer):
            for optimizer in _optimizers_in(value):
                found.setdefault(id(optimizer), optimizer)
    inner = {id(getattr(o, "inner_optimizer", None)) for o in found.values()}
    return [o for key, o in found.items() if key not in inner]


def is_linear(optimizer: Any) -> bool:
    """Return whether an optimizer's steps are proportional to its gradients, as those of SGD are:
    others divide them by their own size, or square them."""
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), keras.optimizers.SGD)


def aligned_slots(optimizer: Any) -> dict[int, Any]:
    """For each slot of an optimizer, by `id()`, the trained variable that it belongs to: slots are
    in lists that have one entry for each."""
    trained = optimizer._trainable_variables
    own = {id(optimizer._iterations), id(optimizer._learning_rate)}
    found = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, (list, tuple)):
            continue
        if len(value) == len(trained):
            for slot, variable in zip(value, trained, strict=True):
                if isinstance(slot, keras.Variable) and id(slot) not in own:
                    found[id(slot)] = variable
    return found


def _layers(model: keras.Model) -> list[Any]:
    return list(model._flatten_layers(include_self=True, recursive=True))


def _attributes(layer: Any) -> Iterator[Any]:
    # model.optimizer first: it is the one that checkpoints and callbacks mean by "the" optimizer.
    attributes = dict(vars(layer))
    if "optimizer" in attributes:
        yield attributes.pop("optimizer")
    for name in sorted(attributes):
        yield attributes[name]


def _optimizers_in(value: Any, depth: int = 0) -> Iterator[keras.optimizers.Optimizer]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif depth < 3 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _optimizers_in(item, depth + 1)
    elif depth < 3 and isinstance(value, dict):
        for item in value.values():
            yield from _optimizers_in(item, depth + 1)
