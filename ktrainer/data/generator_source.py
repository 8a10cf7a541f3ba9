"""Generators, other iterables and torch DataLoaders as sources."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, cast

import keras

from ktrainer.data.batch_source import Piece, close_iterator
from ktrainer.data.data_arguments import from_torch
from ktrainer.data.python_source import SAMPLES, PythonSource
from ktrainer.errors import DataError


class GeneratorSource(PythonSource):
    """The batches of a generator, of another iterable, or of a function that returns one.

    A function is called again for every epoch. A generator cannot be: with a limit, each epoch
    continues where the one before stopped; without, one epoch takes it all, and later ones are
    empty.
    """

    endless = True
    reopens = False
    reorders = True  # as far as one knows

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(**options)
        self._function = getattr(data, "__qualname__", type(data).__name__)
        self._make: Callable[[], Iterable[Any]] | None = None
        if callable(data) and not isinstance(data, types.GeneratorType):
            self._make = data
            self.endless, self.reopens = False, True
            data = data()
        iterator = iter(data)
        first = list(itertools.islice(iterator, SAMPLES))
        self._learn(first)
        self._begun: Iterator[Any] | None = _chained(first, iterator)

    def _tuple(self, batch: Any) -> Any:
        if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
            raise DataError(
                "a generator must yield tuples: (x,), (x, y) or (x, y, sample_weight), "
                f"not {type(batch).__name__}: {str(batch)[:80]}"
            )
        return batch

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        batches, self._begun = self._begun, None
        if batches is None:
            batches = iter(()) if self._make is None else _chained([], iter(self._make()))
        with closing(self._ahead(_chained([], batches), "generator", skip)) as pieces:
            yield from pieces

    def close(self) -> None:
        super().close()
        if self._begun is not None:
            cast(Any, self._begun).close()
            self._begun = None


class LoaderSource(GeneratorSource):
    """The batches of a torch `DataLoader`, which shuffles, and starts workers, by itself.

    It is opened as often as by `Model.fit`: once for its first batches, which are read again in
    the first epoch, and once an epoch. Its draws from torch's seed are then the same; a resumed
    run opens it for the epochs that it skips, too.
    """

    def __init__(self, data: Any, **options: Any) -> None:
        self._loader, self._opened = data, 0
        if options.get("class_weight") is not None:
            raise DataError(
                "class_weight does not go with a torch DataLoader: let it yield sample weights, "
                "(x, y, sample_weight)"
            )
        PythonSource.__init__(self, **options)
        self._function = "the torch DataLoader"
        self.endless, self.reopens, self._begun = False, True, None
        if hasattr(data.dataset, "__len__"):
            self.num_batches = len(data)
        self._learn(itertools.islice(data, SAMPLES))

    def _tuple(self, batch: Any) -> Any:
        batch = keras.tree.map_structure(from_torch, batch)
        return super()._tuple(tuple(batch) if isinstance(batch, list) else batch)

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        while self._opened < epoch:
            next(iter(self._loader), None)
            self._opened += 1
        self._opened += 1
        with closing(self._ahead(_chained([], iter(self._loader)), "torch", skip)) as pieces:
            yield from pieces


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """`first`, then `rest`; closes `rest`, as `itertools.chain` does not."""
    try:
        yield from first
        yield from rest
    finally:
        close_iterator(rest)
