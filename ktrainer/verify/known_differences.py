"""What training cannot have in common with one process, or with `Model.fit`; known before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from ktrainer.data import Feed
from ktrainer.verify.update_split import Split

_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")  # of layers, 0 where they draw nothing
_NAMED = 3


def known_differences(
    model: keras.Model, feed: Feed, split: Split, rounding_only: Sequence[str]
) -> Iterator[str]:
    """Lines for the display, one for each kind of difference.

    Args:
        model: before a pipeline cuts it.
        feed: of the training data.
        rounding_only: paths of variables whose gradients are no more than rounding errors.
    """
    if split.replicas * split.microbatches > 1:
        yield from _of_local_batches(model, split)
        if rounding_only and not isinstance(model.optimizer, keras.optimizers.SGD):
            yield (
                f"unlike one process: the gradient of {_list(rounding_only)} is rounding errors, "
                "which the optimizer scales up; outputs do not depend on it"
            )
    if feed.num_batches is None:
        yield (
            "unlike Model.fit: Keras counts one optimizer iteration too many in each epoch of data "
            "of unknown length"
        )


def _of_local_batches(model: keras.Model, split: Split) -> Iterator[str]:
    layers = list(model._flatten_layers())
    if normalising := [each.path or each.name for each in layers if _normalises(each)]:
        remedy = "" if split.microbatches > 1 else "; synchronized=True uses the whole batch's"
        yield (
            f"unlike one process: {_list(normalising)} (BatchNormalization) uses the statistics of "
            f"each local batch{remedy}"
        )
    if drawing := [each.path or each.name for each in layers if _draws(each)]:
        yield f"unlike one process: {_list(drawing)} draws random numbers for each local batch"


def _normalises(layer: Any) -> bool:
    normalises = isinstance(layer, keras.layers.BatchNormalization)
    return normalises and layer.trainable and not layer.synchronized


def _draws(layer: Any) -> bool:
    rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
    return bool(layer._seed_generators) and (not rates or any(rates))


def _list(names: Sequence[str]) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
