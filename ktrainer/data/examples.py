"""Random-access data sets: of torch, Hugging Face, Grain, ArrayRecord, or one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ktrainer.errors import DataError

# Class and package of what is taken as random-access data although it can be iterated over, too.
_KNOWN = {
    ("Dataset", "torch"),
    ("Dataset", "datasets"),
    ("MapDataset", "grain"),
    ("ArrayRecordDataSource", "array_record"),
}
_MOST = 2**48  # batches of what ends: Grain gives data without an end `sys.maxsize` examples


@dataclass(frozen=True)
class Examples:
    """Any object with `len` and `[index]`, its items turned into examples by a function.

    Args:
        source: the items. `source.__getitems__(indices)` is used where there is one.
        transform: from an item to `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`; None: it is
            one already.
        random: call `transform(item, generator)`, with a `numpy.random.Generator` that depends on
            seed, epoch and index alone, and so draws the same numbers on any number of ranks, and
            after a resume.
        workers: threads that read and transform the examples of a batch; 0 for none but the one
            that makes batches ahead of the step.
    """

    source: Any
    transform: Callable[..., Any] | None = None
    random: bool = False
    workers: int = 0

    def __post_init__(self) -> None:
        if not _has_items(self.source):
            raise DataError(
                f"Examples needs a source with `len(source)` and `source[index]`, and a "
                f"{type(self.source).__name__} lacks one of them"
            )
        if self.random and self.transform is None:
            raise DataError("Examples(random=True) needs a transform(item, generator)")
        if self.workers < 0:
            raise DataError(f"Examples needs a number of workers from 0, not {self.workers}")


def is_random_access(data: Any) -> bool:
    """Return whether data consists of examples by index, told without importing its library."""
    if isinstance(data, Examples):
        return True
    parents = type(data).__mro__
    if any(parent.__name__ == "IterableDataset" for parent in parents) or not _has_items(data):
        return False
    if is_of_grain(data) and _is_batched(data):
        return False
    if any((parent.__name__, parent.__module__.partition(".")[0]) in _KNOWN for parent in parents):
        return True
    others = ("__iter__", "__array__", "shape", "keys")
    return not any(hasattr(data, name) for name in others)


def is_of_grain(data: Any) -> bool:
    """Return whether this is a data set or loader of Grain, told without importing it."""
    return any(parent.__module__.partition(".")[0] == "grain" for parent in type(data).__mro__)


def never_ends(data: Any) -> bool:
    """Return whether this is a data set of Grain that repeats itself without end."""
    return is_of_grain(data) and hasattr(type(data), "__len__") and len(data) > _MOST


def _is_batched(data: Any) -> bool:
    """Return whether a data set of Grain was batched: its items are batches then."""
    parents = getattr(data, "_parents", ())
    return type(data).__name__ == "BatchMapDataset" or any(map(_is_batched, parents))


def _has_items(data: Any) -> bool:
    return hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__")
