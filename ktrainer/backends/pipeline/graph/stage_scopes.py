"""`with partition(i):` scopes, which give layers and calls a stage by hand.

with ktrainer.partition(0):
    h = keras.layers.Embedding(1000, 64)(tokens)
with ktrainer.partition(1):
    h = block(h)               # called here: on stage 1, wherever `block` was created
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ktrainer.backends.pipeline.graph.call_hooks import Watcher, watching
from ktrainer.errors import ConfigError

_TAG = "_ktrainer_stage"


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Put the layers and ops that are created or called inside on pipeline stage `index`.

    The innermost scope wins, and a call beats the creation of what is called. Calls count where
    they are on symbolic tensors: when a functional model is built, and when a pipeline traces a
    model's `call`. It applies to the current thread. Source: `smp.partition` of SageMaker's
    model-parallel library.

    Args:
        index: the stage, from 0.

    Raises:
        ConfigError: `index` is no integer of at least 0.
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigError(
            f"partition({index!r}): a stage is an integer from 0 to backend.partitions x "
            f"backend.chunks - 1. The nearest legal value is {_nearest_stage(index)}."
        )
    with watching(_Tagger(index)):
        yield


def stage_of(thing: Any) -> int | None:
    """The stage on which an operation was created, or a Keras node called; None without."""
    # Looked up past __getattr__ and the layers' tracking of attributes, as it was written.
    return getattr(thing, "__dict__", {}).get(_TAG)


class _Tagger(Watcher):
    def __init__(self, index: int) -> None:
        self.index = index

    # The innermost scope is called first: an operation that has a stage by now keeps it.
    def created(self, operation: Any) -> None:
        operation.__dict__.setdefault(_TAG, self.index)

    def called(self, node: Any) -> None:
        node.__dict__.setdefault(_TAG, self.index)


def _nearest_stage(index: object) -> int:
    return max(0, round(index)) if isinstance(index, (int, float)) else 0
