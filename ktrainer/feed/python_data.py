"""Batches made by Python code: `keras.utils.PyDataset` and generators."""

from __future__ import annotations

import itertools
import json
import random
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import DataError
from ktrainer.feed.classweight import class_weights, lists_to_tuples
from ktrainer.feed.digest import batch_digest
from ktrainer.feed.prefetch import Prefetcher
from ktrainer.feed.shuffling import ShuffleOrder
from ktrainer.feed.source import Piece, Source, compared, count_rows, slicing, take_slice
from ktrainer.feed.specs import require_same_structure, spec_of, widen
from ktrainer.feed.workers import ordered_items
from ktrainer.world.base import World

_SAMPLES = 2  # as Keras: dimensions that differ between two batches are taken as variable


class PythonSource(Source):
    """What PyDatasets and generators share: batches are standardised, sliced and made ahead.

    Args:
        world: whose replica the slice is for.
        sliced: whether all ranks run the same code and each replica takes its slice.
        class_weight: class -> weight, turned into sample weights.
        prefetch: batches kept ready by a background thread; at least 1.
    """

    checked = False

    def __init__(
        self,
        *,
        world: World,
        sliced: bool,
        class_weight: Mapping[int, float] | None,
        prefetch: int,
    ) -> None:
        self._replica, self._replicas = slicing(world, sliced)
        self._cut = compared(world, sliced)
        self._class_weight, self._prefetch = class_weight, prefetch
        self._prefetcher: Prefetcher | None = None
        self._dtypes: list[Any] | None = None

    def _learn(self, batches: Iterable[Any]) -> None:
        """Take `spec` from the first batches."""
        for batch in batches:
            spec = spec_of(self._standard(batch))
            self.spec = spec if self.spec is None else widen(self.spec, spec)
        if self.spec is not None:
            leaves = tf.nest.flatten(self.spec)
            self._dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]

    def _standard(self, batch: Any) -> Any:
        """A user's batch as a tuple or dict of arrays and tensors, dtypes as in `spec`."""
        batch = lists_to_tuples(self._tuple(batch))
        if self._class_weight is not None and isinstance(batch, tuple):
            if len(batch) == 3:
                raise DataError(
                    "class_weight and sample weights exclude each other; give one of them"
                )
            if len(batch) == 2:
                batch = (*batch, class_weights(batch[1], self._class_weight))
        leaves = tf.nest.flatten(batch)
        dtypes = self._dtypes or [None] * len(leaves)
        if self._dtypes is not None:
            require_same_structure(self.spec, batch)
        leaves = [_array(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        return tf.nest.pack_sequence_as(batch, leaves)

    @abstractmethod
    def _tuple(self, batch: Any) -> Any:
        """Check the outer structure of a user's batch."""

    def _pieces(self, batches: Iterator[Any]) -> Iterator[Piece]:
        with closing(cast(Any, batches)):
            for batch in batches:
                whole = self._standard(batch)
                rows = count_rows(whole)
                if not rows:
                    continue
                if not self._cut:
                    yield Piece(whole, rows)
                    continue
                digests = tuple(batch_digest(leaf) for leaf in tf.nest.flatten(whole))
                mine = take_slice(whole, rows, self._replica, self._replicas)
                yield Piece(mine, rows, digests)

    def _ahead(self, batches: Iterator[Any], name: str) -> Prefetcher:
        self.close()
        self._prefetcher = Prefetcher(self._pieces(batches), self._prefetch, name)
        return self._prefetcher

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        if self._prefetcher is None:
            yield None
            return
        with self._prefetcher.paused(timeout) as rests:
            yield None if rests else f"a batch of its data takes more than {timeout:g} s to make"

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


class PyDatasetSource(PythonSource):
    """The batches of a `keras.utils.PyDataset`.

    `workers`, `use_multiprocessing` and `max_queue_size` are honoured; `on_epoch_begin` and
    `on_epoch_end` are called as `Model.fit` calls them (which calls `on_epoch_end` once more
    before the first epoch, and before each validation). A resumed run calls them for the epochs
    that it skips, so that a dataset which reorders itself there is where it was.
    """

    def __init__(self, dataset: keras.utils.PyDataset, **options: Any) -> None:
        super().__init__(**options)
        self.dataset = dataset
        self.num_batches = dataset.num_batches
        self.endless = self.infinite = self.indexed = self.num_batches is None
        if self.num_batches == 0:
            return
        count = _SAMPLES if self.num_batches is None else min(_SAMPLES, self.num_batches)
        self._learn(dataset[i] for i in range(count))
        self._epochs_begun = 0
        self._reset = False
        self._order: ShuffleOrder | None = None
        self._drawn: list[int] = []  # the order of the newest epoch
        self._draws = 0

    def shuffle(self, order: ShuffleOrder) -> bool:
        # As Model.fit does, which draws from Python's `random`.
        if not self.num_batches:
            return False
        self._order = order
        if order.drawn is not None:
            self._draw_again(*order.drawn)
        return True

    @property
    def order(self) -> ShuffleOrder | None:
        return self._order

    def _draw_again(self, epoch: int, state: Any) -> None:
        """Have the order that an epoch was drawn in, and `random` as it was then: on all ranks, of
        which some may be new, and some have used it since."""
        random.setstate(state)
        self._draws = epoch
        self._indices(epoch)

    def state(self) -> bytes | None:
        drawn = None if self._order is None else self._order.drawn
        return None if drawn is None else json.dumps(drawn[1]).encode()

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        version, words, gauss = json.loads(state)
        self._draw_again(epoch, (version, tuple(words), gauss))
        return self.open(epoch, skip)

    def _indices(self, epoch: int) -> Sequence[int]:
        """Which batches to draw, in which order."""
        stop = self.dataset.num_batches
        if self._order is None or not self._order.keras:
            order = None if self._order is None else self._order.rows(epoch, stop, 1, False)
            return range(stop) if order is None else order.tolist()
        while self._draws <= epoch:  # those of skipped epochs too: the next ones follow them
            self._order = self._order._replace(drawn=(self._draws, random.getstate()))
            self._drawn = list(range(stop))
            random.shuffle(self._drawn)
            self._draws += 1
        return self._drawn

    def _tuple(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return batch
        if isinstance(batch, np.ndarray):
            return (batch,)
        batch = tuple(batch) if isinstance(batch, list) else batch
        if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
            raise DataError(
                "PyDataset.__getitem__ must return a dict, (x,), (x, y) or (x, y, sample_weight), "
                f"not {type(batch).__name__}: {str(batch)[:80]}"
            )
        return batch

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        if self.num_batches == 0:
            return
        self._begin(epoch)
        try:
            endless = self.dataset.num_batches is None
            indices = itertools.count(skip) if endless else iter(self._indices(epoch)[skip:])
            with closing(self._ahead(ordered_items(self.dataset, indices), "pydataset")) as pieces:
                yield from pieces
        finally:
            self.dataset.on_epoch_end()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        with super().paused(timeout) as problem:
            if self.dataset.workers > 1 and not self.dataset.use_multiprocessing:
                problem = "several threads of its PyDataset make batches meanwhile"
            yield problem

    def _begin(self, epoch: int) -> None:
        if not self._reset or epoch < self._epochs_begun:  # validation opens the same one again
            self._reset = True
            self.dataset.on_epoch_end()
        while self._epochs_begun < epoch:
            self.dataset.on_epoch_begin()
            self.dataset.on_epoch_end()
            self._epochs_begun += 1
        self._epochs_begun += 1
        self.dataset.on_epoch_begin()


class GeneratorSource(PythonSource):
    """The batches of a generator, of another iterable, or of a function that returns one.

    A function is called anew for every epoch. A generator cannot be: with a limit, each epoch
    goes on where the one before stopped; without, one epoch takes it all, and later ones are empty.
    """

    endless = True
    reopens = False

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(**options)
        self._make: Callable[[], Iterable[Any]] | None = None
        if callable(data) and not isinstance(data, types.GeneratorType):
            self._make = data
            self.endless, self.reopens = False, True
            data = data()
        iterator = iter(data)
        first = list(itertools.islice(iterator, _SAMPLES))
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
        pieces = self._ahead(_chained([], batches), "generator")
        with closing(pieces):
            yield from itertools.islice(pieces, skip, None)

    def close(self) -> None:
        super().close()
        if self._begun is not None:
            cast(Any, self._begun).close()
            self._begun = None


class LoaderSource(GeneratorSource):
    """The batches of a torch `DataLoader`, which shuffles, and starts workers, by itself.

    It is opened as often as by `Model.fit`: once to look at its first batches, which are read
    again in the first epoch, and once an epoch. What it draws from torch's seed is then the same;
    a resumed run opens it for the epochs that it skips, too.
    """

    def __init__(self, data: Any, **options: Any) -> None:
        self._loader, self._opened = data, 0
        if options.get("class_weight") is not None:
            raise DataError(
                "class_weight does not go with a torch DataLoader: let it yield sample weights, "
                "(x, y, sample_weight)"
            )
        PythonSource.__init__(self, **options)
        self.endless, self.reopens, self._begun = False, True, None
        if hasattr(data.dataset, "__len__"):
            self.num_batches = len(data)
        self._learn(itertools.islice(data, _SAMPLES))

    def _tuple(self, batch: Any) -> Any:
        batch = keras.tree.map_structure(_from_torch, batch)
        return super()._tuple(tuple(batch) if isinstance(batch, list) else batch)

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        while self._opened < epoch:
            next(iter(self._loader), None)
            self._opened += 1
        self._opened += 1
        with closing(self._ahead(_chained([], iter(self._loader)), "torch")) as pieces:
            yield from itertools.islice(pieces, skip, None)


def _from_torch(leaf: Any) -> Any:
    """A tensor of torch as a NumPy array; anything else as it is."""
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):
        return np.asarray(leaf.detach().cpu())
    return leaf


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """`first`, then `rest`; closes `rest`, as `itertools.chain` does not."""
    try:
        yield from first
        yield from rest
    finally:
        close = getattr(rest, "close", None)
        if close is not None:
            close()


def _array(leaf: Any, dtype: tf.DType | None) -> Any:
    """A leaf of a user's batch as a tensor or a NumPy array."""
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    if isinstance(leaf, (tf.Tensor, tf.Variable)):
        return leaf if dtype in (None, leaf.dtype) else tf.cast(leaf, dtype)
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise DataError(f"a batch holds a single number ({leaf!r}) where rows are expected")
    if array.dtype.kind in "OUS":
        return tf.convert_to_tensor(array, tf.string)
    return array if dtype is None else array.astype(dtype.as_numpy_dtype, copy=False)
