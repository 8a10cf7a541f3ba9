"""Local layers: variables that stay a rank's own, neither broadcast nor reduced.

Whoever treats the variables of a model asks `local_variables(model)`: the broadcast, the reduction
of gradients and of statistics, checkpoints, and the comparison of ranks. The optimizers' slots of
a local variable are local too.

The loss of an update is the sum of w * L over ranks, where w is a rank's share of the examples. Its
gradient by a local variable, on which one rank's L alone depends, is w times that of L.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ktrainer.config.name_patterns import compile_pattern, matches, refuse_unmatched
from ktrainer.errors import ModelError
from ktrainer.steps.optimizers import aligned_slots, optimizers_of

_KEY = "backend.local_layers"
_patterns: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


def set_local_layers(model: keras.Model, patterns: Iterable[str]) -> None:
    """Note which layers of `model` are local from now on; none if there are no patterns."""
    _patterns[model] = tuple(patterns)


def local_variables(model: Any) -> Collection[int]:
    """The `id()` of each local variable of a model and its optimizers, of those that are made."""
    own = {id(variable) for _, variable in _matched(model)}
    return frozenset(own | slots_of(optimizers_of(model), own)) if own else frozenset()


def local_paths(model: Any) -> list[str]:
    """The names of the local variables of a model, from the model down."""
    return [name for name, _ in _matched(model)]


def _matched(model: Any) -> list[tuple[str, Any]]:
    compiled = [compile_pattern(pattern, _KEY) for pattern in _patterns.get(model, ())]
    named = named_from_model(model) if compiled else []
    return [(n, v) for n, v in named if any(matches(pattern, n) for pattern in compiled)]


def slots_of(optimizers: Iterable[Any], weights: Collection[int]) -> set[int]:
    """The `id()` of each optimizer variable that belongs to one of `weights`, by their `id()`."""
    return {
        slot
        for optimizer in optimizers
        if optimizer.built
        for slot, weight in aligned_slots(getattr(optimizer, "inner_optimizer", optimizer)).items()
        if id(weight) in weights
    }


def check_local_layers(model: keras.Model) -> None:
    """Refuse local layers that cannot be trained, once the variables of `model` are made.

    Raises:
        ConfigError: a pattern matches nothing.
        ModelError: an optimizer decides on all gradients at once, or has slots of unknown weights.
    """
    names = [name for name, _ in named_from_model(model)]
    for i, pattern in enumerate(_patterns.get(model, ())):
        path = f"{_KEY}[{i}]"
        if not any(matches(compile_pattern(pattern, path), name) for name in names):
            refuse_unmatched(pattern, names, path)
    local = local_variables(model)
    for optimizer in optimizers_of(model):
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        kinds = {id(v) in local for v in getattr(plain, "_trainable_variables", ())}
        if len(kinds) > 1:
            refuse_mixed_decisions(optimizer)
        if True in kinds:
            _refuse_unknown_slots(plain)


def refuse_mixed_decisions(optimizer: Any) -> None:
    """Refuse an optimizer that decides on all gradients at once: local ones differ between ranks.

    Raises:
        ModelError: ranks would update shared variables differently.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        what, instead = "a LossScaleOptimizer skips updates", "train in float32 or bfloat16"
    elif getattr(optimizer, "global_clipnorm", None) is not None:
        what, instead = "global_clipnorm scales all gradients", "use clipnorm or clipvalue"
    else:
        return
    raise ModelError(
        f"{optimizer.name!r} has local variables, and {what} by what it finds in those of this "
        f"rank: ranks would update shared variables differently. Instead, {instead}."
    )


def _refuse_unknown_slots(optimizer: Any) -> None:
    known = aligned_slots(optimizer)
    unknown = [v.name for v in optimizer.variables if tuple(v.shape) and id(v) not in known]
    if unknown:
        raise ModelError(
            f"{type(optimizer).__name__} has variables of which it cannot be told whether they "
            f"belong to a local layer: {', '.join(unknown[:3])}. Keep them in lists with one entry "
            "for each trained variable, as Keras' optimizers do, or train without "
            f"{_KEY}."
        )


def named_from_model(model: Any) -> list[tuple[str, Any]]:
    """(name, variable) of all variables of the layers of `model`: `head/dense/kernel`, from the
    model down, whatever scope a layer was built in. Those of a layer in two places come twice."""
    return list(_named(model, "", ()))


def _named(layer: Any, prefix: str, outer: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    inner = layer._flatten_layers(include_self=False, recursive=False)
    deeper = {id(variable) for each in inner for variable in each.variables}
    for variable in layer.variables:
        if id(variable) not in deeper:
            yield f"{prefix}{variable.name}", variable
    for each in inner:
        if not any(each is one for one in outer):
            yield from _named(each, f"{prefix}{each.name}/", (*outer, each))
