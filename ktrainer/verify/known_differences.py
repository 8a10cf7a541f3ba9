"""Differences from one process, and from `Model.fit`, that are known before training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from ktrainer.data import Feed
from ktrainer.distributed import World
from ktrainer.steps.local_layers import local_paths
from ktrainer.steps.optimizers import is_linear
from ktrainer.verify.first_update_check import UpdateFacts, first_line
from ktrainer.verify.update_split import Split

# Of layers, 0 where they draw nothing.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout", "factor")
_NAMED = 3


def known_differences(
    model: keras.Model, feed: Feed, split: Split, facts: UpdateFacts
) -> Iterator[str]:
    """Lines for the display, one for each kind of difference.

    An error in here is no error of the run: it becomes a line.

    Args:
        model: before a pipeline cuts it.
        feed: of the training data.
        facts: of the first update.
    """
    try:
        yield from _differences(model, feed, split, facts)
    except Exception as error:
        yield f"differences from one process cannot be listed: {first_line(error)}"


def print_new(lines: Iterable[str], printed: set[str], world: World) -> None:
    """Print, on rank 0, the lines that are not in `printed` yet, and add them to it."""
    new = [line for line in lines if line not in printed]
    printed.update(new)
    for line in new if world.is_root else ():
        print(f"ktrainer: {line}", file=sys.stderr, flush=True)


def _differences(model: keras.Model, feed: Feed, split: Split, facts: UpdateFacts) -> Iterator[str]:
    if split.parts > 1:
        yield from _of_local_batches(model, split)
        if split.in_turn > 1 and facts.assigned:
            part = "microbatch" if split.microbatches > 1 else "accumulated batch"
            yield (
                f"unlike one process: what a layer assigns to {_list(facts.assigned)} is assigned "
                f"in each {part}"
            )
        if split.microbatches > 1 and (kind := _overridden_apply(model)):
            yield f"unlike one process: {kind} gets the gradients of one stage at a time"
        rounding_only = [*facts.rounding_only]
        if split.microbatches == 1:
            rounding_only += _biases_before_normalization(model)
        if rounding_only:
            yield (
                f"unlike one process: the gradient of {_list(rounding_only)} is no more than "
                "rounding errors, which the optimizer scales up"
            )
    if feed.num_batches is None:
        yield (
            "unlike Model.fit: Keras counts one optimizer iteration too many in each epoch of data "
            "of unknown length"
        )


def _of_local_batches(model: keras.Model, split: Split) -> Iterator[str]:
    if own := local_paths(model):
        yield f"unlike one process: {_list(own)} (backend.local_layers) are each rank's own"
    layers = list(model._flatten_layers())
    parts = split.in_turn > 1  # which nothing synchronizes
    normalising = [
        each.path or each.name
        for each in layers
        if _normalises(each) and (parts or not each.synchronized)
    ]
    if normalising:
        remedy = "" if parts else "; synchronized=True uses the whole batch's"
        yield (
            f"unlike one process: {_list(normalising)} (BatchNormalization) uses the statistics of "
            f"each local batch{remedy}"
        )
    if drawing := [each.path or each.name for each in layers if _draws(each)]:
        yield f"unlike one process: {_list(drawing)} draws random numbers for each local batch"


def _overridden_apply(model: keras.Model) -> str:
    """The method of a user's optimizer that is given all gradients at once; empty: it has none."""
    optimizer = getattr(model, "optimizer", None)
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    for kind in type(plain).__mro__:
        for name in ("apply", "apply_gradients", "_backend_apply_gradients"):
            if name in vars(kind) and not kind.__module__.startswith("keras."):
                return f"{kind.__name__}.{name}"
    return ""


def _normalises(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _biases_before_normalization(model: keras.Model) -> Iterator[str]:
    """Paths of biases that a synchronized BatchNormalization subtracts again, with the mean, so
    that their gradients are rounding errors; where the optimizer scales them up."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or is_linear(optimizer):
        return
    for layer in model._flatten_layers():
        bias: Any = getattr(layer, "bias", None)
        linear = getattr(layer, "activation", None) is keras.activations.linear
        penalties = getattr(layer, "bias_regularizer", None), layer.activity_regularizer
        if not getattr(bias, "trainable", False) or not linear or any(penalties):
            continue
        made = [t for node in layer._inbound_nodes for t in node.outputs]
        is_output = any(t is out for t in made for out in getattr(model, "outputs", None) or ())
        readers = [node.operation for node in layer._outbound_nodes]
        if readers and not is_output and all(map(_subtracts_mean, readers)):
            yield bias.path


def _subtracts_mean(layer: Any) -> bool:
    return _normalises(layer) and layer.synchronized and layer.axis == -1


def _draws(layer: Any) -> bool:
    rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
    return bool(layer._seed_generators) and (not rates or not all(map(_is_zero, rates)))


def _is_zero(rate: Any) -> bool:
    """Return whether a layer's rate is the number 0; it may be anything of the user's."""
    if isinstance(rate, tuple):
        return all(map(_is_zero, rate))
    return isinstance(rate, (int, float)) and rate == 0


def _list(names: Sequence[str]) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
