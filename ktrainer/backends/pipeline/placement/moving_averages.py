"""Moving averages of weights (`use_ema`) of a cut model: each process keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from ktrainer.runtime.monkeypatching import Replacement
from ktrainer.steps.variable_placement import placement_of

_LISTS = ("_trainable_variables", "_model_variables_moving_average")


@contextmanager
def held_averages(model: Any) -> Iterator[list[Any]]:
    """Inside the block the optimizer's lists of weights and averages are those held here.

    Yields:
        The trained weights that are held here.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    placement = placement_of(model)
    lists = {name: getattr(optimizer, name) for name in _LISTS if hasattr(optimizer, name)}
    weights = lists.get(_LISTS[0], [])
    held = [placement is None or placement.holds(v) for v in weights]
    here = {
        name: [x for x, is_held in zip(values, held, strict=True) if is_held]
        for name, values in lists.items()
    }
    # Past Keras' tracking, which would add the weights to the optimizer's own variables.
    vars(optimizer).update(here)
    try:
        yield here.get(_LISTS[0], [])
    finally:
        vars(optimizer).update(lists)


def swap_held_averages() -> list[Replacement]:
    """Replacements by which `keras.callbacks.SwapEMAWeights` swaps what is held here."""
    callback = keras.callbacks.SwapEMAWeights

    def on_held(original: Callable[..., None]) -> Callable[..., None]:
        def apply(self: Any) -> None:
            with held_averages(self.model):
                original(self)

        return apply

    names = ("_swap_variables", "_finalize_ema_values")
    return [(callback, name, on_held(getattr(callback, name))) for name in names]
