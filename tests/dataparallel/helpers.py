"""Functions for ranks: an initialised interface, values that follow from the rank, closed sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

SECONDS = 20.0


@contextmanager
def started(deadline: float = SECONDS, **settings: Any) -> Iterator[Any]:
    """`ktrainer.dataparallel`, initialised in the block."""
    import ktrainer.dataparallel as hvd

    hvd.init(deadline=deadline, **settings)
    try:
        yield hvd
    finally:
        hvd.shutdown()


def values(rank: int, shape: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> np.ndarray:
    """What a rank puts in: numbers of both signs."""
    random = np.random.default_rng([rank, seed, *shape])
    return np.asarray(random.normal(0, 10, shape)).astype(dtype)


def modes(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A function as it runs eagerly and inside of `tf.function`."""
    import tensorflow as tf

    return {"eager": function, "traced": tf.function(function, autograph=False)}


def caught(function: Callable[[], Any]) -> str:
    """The class and the text of what a function raises, `""` if it does not."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
