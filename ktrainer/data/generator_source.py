"""Generators, other iterables and torch DataLoaders as sources."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np

from ktrainer.data.batch_source import Piece, close_iterator, labelled, unlabelled
from ktrainer.data.data_arguments import copied
from ktrainer.data.one_shot_iterator import OneShotReader
from ktrainer.data.python_source import SAMPLES, PythonSource
from ktrainer.errors import DataError

_SAMPLERS = {"torch.utils.data.sampler", "torch.utils.data.distributed"}  # torch's own are there


class GeneratorSource(PythonSource):
    """The batches of a generator, of another iterable, or of a function that returns one.

    A function is called again for every epoch; a resumed run calls it for the epochs that it skips,
    too, and reads a batch of each, for those that draw an order from a generator of their own. A
    generator cannot be called: with a limit, each epoch continues where the one before stopped;
    without, one epoch takes it all, and later ones are empty. It stays open for later calls. Each
    validation reads its first two batches again, then the next ones, as in Keras.
    """

    endless = True
    reopens = False
    reorders = unseeded = True  # as far as one knows
    _reader: OneShotReader | None = None  # of a generator

    def __init__(
        self, data: Any, *, check: bool = True, x_alone: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self._x_alone = x_alone
        self._function = getattr(data, "__qualname__", type(data).__name__)
        self._make: Callable[[], Iterable[Any]] | None = None
        self._opened = 0
        self._orders_differ = False
        if callable(data) and not isinstance(data, types.GeneratorType):
            self._make, world = data, options["world"]
            # Where surviving ranks continue, two calls were compared, and found to be alike.
            alike = world.heals and check and 1 < world.size == world.replicas
            self._orders_differ = self.shuffles = not alike
            self.endless, self.reopens = False, True
            with self._reading_samples():
                made = iter(data())
                first = list(map(copied, itertools.islice(made, SAMPLES)))
            self._begun: Iterator[Any] | None = _copies(made, first)
        else:
            self._given = data
            with self._reading_samples():
                first = list(itertools.islice(OneShotReader(data), SAMPLES))
            self._begun = self._reader = OneShotReader(data)
            self._again = first
        self._learn(first)

    def _tuple(self, batch: Any) -> Any:
        if self._x_alone:
            batch = tuple(batch) if isinstance(batch, list) else batch
            if isinstance(batch, dict) or hasattr(batch, "shape"):
                return batch
        if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
            raise DataError(
                "a generator must yield tuples: (x,), (x, y) or (x, y, sample_weight), "
                f"not {type(batch).__name__}: {str(batch)[:80]}"
            )
        return batch

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        self._pass_over(epoch)
        with closing(self._ahead(self._open_next(), "generator", skip)) as pieces:
            yield from pieces

    def _piece(self, whole: Any) -> Piece:
        piece = super()._piece(whole)
        return piece if self._reader is None else piece._replace(end=self._reader.end)

    def take(self, piece: Piece) -> bool:
        return self._reader is None or self._reader.use(piece.end)

    def use(self, batches: int) -> None:
        if self._reader is not None:
            self._reader.use(self._reader.begin + batches)

    def replay_passes(self, passes: int, openings: int) -> None:
        self._pass_over(passes)

    def _pass_over(self, epoch: int) -> None:
        """Begin all epochs before this one, as an order may be drawn then; no more of them is read,
        so what an order draws on the way is missed."""
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
        if self._make is not None:
            return _copies(iter(self._make()))
        self._reader = OneShotReader(self._given, self._again)
        return self._reader

    def close(self) -> None:
        super().close()
        close_iterator(self._begun)
        self._begun = None


class LoaderSource(GeneratorSource):
    """The batches of a torch `DataLoader`, which shuffles, and starts workers, by itself.

    It is opened as often as by `Model.fit`, on any number of ranks: once for its first batches, and
    once an epoch. Its draws from torch's seed are then the same. A resumed run restores generators
    of torch: the loader's own, and the default one, from which a loader of validation data draws,
    too. It opens the epochs that it skips if the order may come from anything else.
    """

    state_of_opening, unseeded = True, False

    def __init__(self, data: Any, **options: Any) -> None:
        self._loader, self._opened = data, 0
        self._at_opening: bytes | None = None  # torch's generators, as the newest epoch began
        self._is_drawn = False  # its order
        self._at_close: bytes | None = None  # the generator that others share, as it ended
        if options.get("class_weight") is not None:
            raise DataError(
                "class_weight does not go with a torch DataLoader: let it yield sample weights, "
                "(x, y, sample_weight)"
            )
        PythonSource.__init__(self, **options)
        self._function, self._x_alone = "the torch DataLoader", True
        self.endless, self.reopens, self._begun, self._make = False, True, None, lambda: data
        world = options["world"]  # where surviving ranks continue, only those in order are taken
        self._orders_differ = not (world.heals and world.size == world.replicas)
        if hasattr(data.dataset, "__len__"):
            self.num_batches = len(data)
        self._first: Piece | None = None
        with self._reading_samples():
            self._items_draw = self._read_samples()

    def _read_samples(self) -> bool:
        """Look at the first batches; return whether making one draws from the generator that
        others share."""
        states = set()
        for batch in map(copied, itertools.islice(iter(self._loader), SAMPLES)):
            self._learn([batch])
            piece = self._piece(self._standard(batch))
            self._first = self._first or (piece if piece.rows else None)
            states.add(_states_of(_default_generator()))
        return len(states) > 1

    def look(self) -> Piece | None:
        return self._first

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        return self._read(epoch, skip, b"")

    def _read(self, epoch: int, skip: int, shared: bytes) -> Iterator[Piece]:
        """The batches of an epoch after the first `skip`.

        Args:
            shared: the state that the generator which others share has once the order is drawn.
        """
        try:
            with closing(cast(Any, super().open(epoch, skip))) as pieces:
                first = list(itertools.islice(pieces, 1))
                self._is_drawn = True
                if shared:
                    _restore(self._shared(), shared)
                yield from first
                yield from pieces
        finally:
            if self._is_drawn:
                self._at_close = _states_of(self._shared())

    def _open_next(self) -> Iterator[Any]:
        self._at_opening, self._at_close = _states_of(self._generators()), None
        self._is_drawn = False
        return super()._open_next()

    def state(self) -> bytes | None:
        """Torch's generators as the newest epoch began and, unless its items draw, the one that
        others share as it is, or was as the epoch ended: validation inside the epoch may have drawn
        since. Its own ones draw as the epoch is read again."""
        if not self._at_opening or self._items_draw or not self._is_drawn:
            return self._labelled(self._at_opening)
        shared = _states_of(self._shared()) if self._at_close is None else self._at_close
        return self._labelled(self._at_opening + shared)

    def state_between(self) -> bytes | None:
        return self._labelled(_states_of(self._generators()))

    def _labelled(self, states: bytes | None) -> bytes | None:
        return labelled(self._label, states) if states else None

    @property
    def _label(self) -> str:
        own = len(self._generators()) - len(self._shared())
        size = len(_states_of(self._generators()))
        return f"a torch DataLoader with {own} generators of its own ({size} bytes)"

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        states = unlabelled(self._label, state, epoch, skip)
        if states is None:
            return self.open(epoch, skip)
        if _draws_by_torch(self._loader):
            self._opened = epoch  # what the order depends on is restored
        self._pass_over(epoch)  # which draws
        every = self._generators()
        size = len(_states_of(every))
        _restore(every, states[:size])
        return self._read(epoch, skip, states[size:])

    def _generators(self) -> list[Any]:
        """Torch's generators that its order may come from, each once."""
        found = [
            getattr(owner, "generator", None) for owner in (self._loader, *_samplers(self._loader))
        ]
        # A sampler's may be one of NumPy.
        own = [each for each in found if hasattr(each, "manual_seed")]
        return list({id(each): each for each in [*_default_generator(), *own]}.values())

    def _shared(self) -> list[Any]:
        """The default generator, from which others draw, unless it was given to this loader."""
        given = getattr(self._loader, "generator", None)
        return [each for each in _default_generator() if each is not given]


def _samplers(loader: Any) -> list[Any]:
    """What chooses the examples of a torch DataLoader's batches."""
    batches = getattr(loader, "batch_sampler", None)
    every = batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None)
    return [each for each in every if each is not None]


def _draws_by_torch(loader: Any) -> bool:
    """Return whether the order of a DataLoader is torch's work alone: not of a class of the user's,
    nor of iterable data, which comes with a sampler that is not among torch's others."""
    modules = {type(each).__module__ for each in _samplers(loader)}
    return type(loader).__module__ == "torch.utils.data.dataloader" and modules <= _SAMPLERS


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


def _copies(rest: Iterator[Any], first: Iterable[Any] = ()) -> Iterator[Any]:
    """`first`, then copies of `rest`, each made before the next is asked for; closes `rest`."""
    try:
        yield from first
        yield from map(copied, rest)
    finally:
        close_iterator(rest)
