"""Generators, other iterables and torch DataLoaders as sources."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, cast

import keras
import numpy as np

from ktrainer.data.batch_source import Piece, close_iterator
from ktrainer.data.data_arguments import from_torch
from ktrainer.data.python_source import SAMPLES, PythonSource
from ktrainer.errors import DataError


class GeneratorSource(PythonSource):
    """The batches of a generator, of another iterable, or of a function that returns one.

    A function is called again for every epoch; a resumed run calls it for the epochs that it skips,
    too, and reads a batch of each, for those that draw an order from a generator of their own. A
    generator cannot be called: with a limit, each epoch continues where the one before stopped;
    without, one epoch takes it all, and later ones are empty.
    """

    endless = True
    reopens = False
    reorders = True  # as far as one knows

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(**options)
        self._function = getattr(data, "__qualname__", type(data).__name__)
        self._make: Callable[[], Iterable[Any]] | None = None
        self._opened = 0
        self._orders_differ = False
        if callable(data) and not isinstance(data, types.GeneratorType):
            self._make, world = data, options["world"]
            # Where surviving ranks go on, all calls were found to be alike.
            self._orders_differ = not (world.heals and world.replicas == world.size)
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
        self._pass_over(epoch)
        with closing(self._ahead(_chained([], self._open_next()), "generator", skip)) as pieces:
            yield from pieces

    def _pass_over(self, epoch: int) -> None:
        """Begin all epochs before this one."""
        while self._orders_differ and self._opened < epoch:
            passed = self._open_next()
            next(passed, None)
            close_iterator(passed)

    def _open_next(self) -> Iterator[Any]:
        """The batches of the next epoch."""
        self._opened += 1
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        return iter(()) if self._make is None else iter(self._make())

    def close(self) -> None:
        super().close()
        if self._begun is not None:
            cast(Any, self._begun).close()
            self._begun = None


class LoaderSource(GeneratorSource):
    """The batches of a torch `DataLoader`, which shuffles, and starts workers, by itself.

    It is opened as often as by `Model.fit`: once for its first batches, which are read again in
    the first epoch, and once an epoch. Its draws from torch's seed are then the same. A resumed run
    opens it for the epochs that it skips, as an order may come from anywhere, and restores
    generators of torch: its own, and the default one, from which a loader of validation data draws,
    too.
    """

    state_is_common = True

    def __init__(self, data: Any, **options: Any) -> None:
        self._loader, self._opened = data, 0
        self._at_opening: bytes | None = None  # torch's generators, as the newest epoch began
        if options.get("class_weight") is not None:
            raise DataError(
                "class_weight does not go with a torch DataLoader: let it yield sample weights, "
                "(x, y, sample_weight)"
            )
        PythonSource.__init__(self, **options)
        self._function = "the torch DataLoader"
        self.endless, self.reopens, self._begun, self._make = False, True, None, lambda: data
        self._orders_differ = True
        if hasattr(data.dataset, "__len__"):
            self.num_batches = len(data)
        batches, between = iter(data), set()
        for batch in itertools.islice(batches, SAMPLES):
            self._learn([batch])
            between.add(self.state_between())
        self._items_draw = len(between) > 1  # from torch, in this process

    def _tuple(self, batch: Any) -> Any:
        batch = keras.tree.map_structure(from_torch, batch)
        return super()._tuple(tuple(batch) if isinstance(batch, list) else batch)

    def _open_next(self) -> Iterator[Any]:
        self._at_opening = self.state_between()
        return super()._open_next()

    def state(self) -> bytes | None:
        """Torch's generators as the newest epoch began and, unless its items draw, the one that
        others share as it is: validation inside the epoch may have drawn since. Its own one draws
        as the epoch is read again."""
        if self._at_opening is None or self._items_draw:
            return self._at_opening
        return self._at_opening + _states_of(self._shared())

    def began_at(self, state: bytes) -> bool:
        return self._at_opening is not None and state.startswith(self._at_opening)

    def state_between(self) -> bytes | None:
        return _states_of(self._generators()) or None

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        self._pass_over(epoch)  # which draws
        every, shared = self._generators(), self._shared()
        size = len(_states_of(every))
        if len(state) not in (size, size + len(_states_of(shared))):
            yield from self.open(epoch, skip)  # it is another loader's
            return
        _restore(every, state[:size])
        with closing(cast(Any, self.open(epoch, skip))) as pieces:
            first = list(itertools.islice(pieces, 1))  # now its order is drawn
            if state[size:]:
                _restore(shared, state[size:])
            yield from first
            yield from pieces

    def _generators(self) -> list[Any]:
        """Torch's generators that its order may come from, each once."""
        loader, batches = self._loader, getattr(self._loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
        owners = [loader, batches, *samplers]
        found = [getattr(owner, "generator", None) for owner in owners]
        every = [*_default_generator(), *(each for each in found if hasattr(each, "get_state"))]
        return list({id(each): each for each in every}.values())

    def _shared(self) -> list[Any]:
        """The default generator, from which others draw, unless it was given to this loader."""
        given = getattr(self._loader, "generator", None)
        return [each for each in _default_generator() if each is not given]


def _default_generator() -> list[Any]:
    """That of torch, if it is there."""
    default = getattr(sys.modules.get("torch"), "default_generator", None)
    return [] if default is None else [default]


def _states_of(generators: list[Any]) -> bytes:
    return b"".join(np.asarray(each.get_state()).tobytes() for each in generators)


def _restore(generators: list[Any], states: bytes) -> None:
    for generator in generators:
        size = len(_states_of([generator]))
        own, states = np.frombuffer(states[:size], np.uint8).copy(), states[size:]
        generator.set_state(sys.modules["torch"].from_numpy(own))


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """`first`, then `rest`; closes `rest`, as `itertools.chain` does not."""
    try:
        yield from first
        yield from rest
    finally:
        close_iterator(rest)
