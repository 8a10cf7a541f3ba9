"""The averages of `use_ema` that Keras' SwapEMAWeights puts in the place of the trained weights.

It does so in a validation and, with `swap_on_epoch`, from the end of an epoch to the begin of the
next one; a flag says so. Keras knows of no rollback, of no epoch that begins a second time, and of
no end but that of the last epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras


def _swapped(callbacks: Iterable[Any]) -> list[Any]:
    """Those that have the averages in the model."""
    swaps = (c for c in callbacks if isinstance(c, keras.callbacks.SwapEMAWeights))
    return [swap for swap in swaps if swap._ema_weights_in_model]


def swap_back(callbacks: Iterable[Any]) -> None:
    """Put the trained weights into the model, if the averages are there."""
    for swap in _swapped(callbacks):
        swap._swap_variables()
        swap._ema_weights_in_model = False


@contextmanager
def swapped_as_before(callbacks: Iterable[Any]) -> Iterator[None]:
    """Restore what callbacks know of the swap at the end of a block that leaves variables as they
    were."""
    swapped = _swapped(callbacks)
    yield
    for swap in swapped:
        swap._ema_weights_in_model = True


def keep_averages(callbacks: Iterable[Any]) -> None:
    """Have the optimizer end training with the averages where they are in the model, as Keras does
    in the last epoch: it would put the trained weights there. Only with `swap_on_epoch`: else they
    are there after a `predict` with the callback, and Keras has trained them."""
    for swap in _swapped(callbacks):
        if swap.swap_on_epoch:
            swap._finalize_ema_values()
