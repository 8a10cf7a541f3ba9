"""`keras.utils.PyDataset` as a source, its items made by the threads or processes it asks for."""

from __future__ import annotations

import itertools
import random
import struct
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from ktrainer.data.batch_source import Piece, labelled, unlabelled
from ktrainer.data.data_arguments import copied
from ktrainer.data.python_source import SAMPLES, PythonSource
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.errors import DataError

_dataset: Any = None  # of this worker process
_VERSION = 3  # of the state of Python's `random`: 624 words, a position, and a number kept or not
_RANDOM = struct.Struct("<625I?d")
_LABEL = "a PyDataset whose batches Python's `random` orders"
_CHUNK = 1024  # batches whose order is looked up together


class PyDatasetSource(PythonSource):
    """The batches of a `keras.utils.PyDataset`.

    `workers`, `use_multiprocessing` and `max_queue_size` are honoured; `on_epoch_begin` and
    `on_epoch_end` are called as `Model.fit` calls them (which calls `on_epoch_end` once more
    before the first epoch, and before each validation). A resumed run calls them for the epochs
    that it skips, so that a dataset which reorders itself there is where it was.
    """

    state_of_opening = True
    shuffles = True  # as far as one knows, in its hooks

    def __init__(self, dataset: keras.utils.PyDataset, **options: Any) -> None:
        super().__init__(**options)
        self.dataset, self._function = dataset, f"{type(dataset).__name__}.__getitem__"
        self.num_batches = dataset.num_batches
        self.endless = self.infinite = self.indexed = self.num_batches is None
        self._order: ShuffleOrder | None = None
        self._in_order = False  # whether one worker does the work of several
        if self.num_batches == 0:
            return
        count = SAMPLES if self.num_batches is None else min(SAMPLES, self.num_batches)
        with self._reading_samples():
            self._learn(dataset[i] for i in range(count))
        self._in_order = self._draws_globally and dataset.workers > 1
        if self._in_order and options["world"].is_root:
            warnings.warn(
                f"{type(dataset).__name__}: its batches are made from np.random or random, so "
                f"one worker makes them in order: {dataset.workers} would draw in an order of "
                "their own on each rank. To use them, draw from "
                "np.random.default_rng([seed, index])",
                stacklevel=2,
            )
        self._epochs_begun = 0
        self._has_begun = False  # epoch 0, for a look at its first batch that was dropped since
        self._reset = False
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
        """Restore the order of an epoch, and `random` as it was then; on all ranks, since some may
        be new, and some have used it since."""
        random.setstate(state)
        self._draws = epoch
        self._as_keras(epoch, self.dataset.num_batches)

    def state(self) -> bytes | None:
        drawn = None if self._order is None else self._order.drawn
        return None if drawn is None else _packed(drawn[1])  # None: a function of the seed

    def state_between(self) -> bytes | None:
        if self._order is None or self._order.drawn is None:
            return None
        return _packed(random.getstate())  # the next order is drawn from it

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        label = _LABEL if self._order is not None and self._order.keras else "a PyDataset"
        if (packed := unlabelled(label, state, epoch, skip)) is not None:
            *words, has_gauss, gauss = _RANDOM.unpack(packed)
            self._draw_again(epoch, (_VERSION, tuple(words), gauss if has_gauss else None))
        return self.open(epoch, skip)

    def _indices(self, epoch: int, skip: int) -> Iterator[int]:
        """The batches to draw after the first `skip`, in order."""
        stop = self.dataset.num_batches
        if self._order is None:
            return iter(range(skip, stop))
        if self._order.keras:
            return iter(self._as_keras(epoch, stop)[skip:])
        order = self._order.rows(epoch, stop, 1, False)
        return (i for at in range(skip, stop, _CHUNK) for i in order[at : at + _CHUNK].tolist())

    def _as_keras(self, epoch: int, stop: int) -> list[int]:
        assert self._order is not None
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
        if not (self._has_begun and epoch == 0):
            self._begin(epoch)
        self._has_begun = False
        try:
            endless = self.dataset.num_batches is None
            indices = itertools.count(skip) if endless else self._indices(epoch, skip)
            make = _plain if self._in_order else ordered_items
            with closing(self._ahead(make(self.dataset, indices), "pydataset")) as pieces:
                yield from pieces
        finally:
            if not self._has_begun:
                self.dataset.on_epoch_end()

    def drop_peeked(self, pieces: Iterator[Piece]) -> None:
        self._has_begun = True  # to the dataset, epoch 0 continues when it is opened again
        super().drop_peeked(pieces)

    def replay_passes(self, passes: int, openings: int) -> None:
        if self.num_batches == 0:
            return
        if self._has_begun:
            self._has_begun = False
            self.dataset.on_epoch_end()
        while self._epochs_begun < passes:
            self._begin(0)
            self.dataset.on_epoch_end()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        with super().paused(timeout) as problem:
            threads = self.dataset.workers > 1 and not self.dataset.use_multiprocessing
            if threads and not self._in_order:
                problem = "several threads of its PyDataset make batches meanwhile"
            yield problem

    def _begin(self, epoch: int) -> None:
        if self._has_begun:
            self.dataset.on_epoch_end()
        if not self._reset or epoch < self._epochs_begun:  # validation opens the same one again
            self._reset = True
            self.dataset.on_epoch_end()
        while self._epochs_begun < epoch:
            self.dataset.on_epoch_begin()
            self.dataset.on_epoch_end()
            self._epochs_begun += 1
        self._epochs_begun += 1
        self.dataset.on_epoch_begin()


def _packed(state: Any) -> bytes:
    version, words, gauss = state
    assert version == _VERSION
    return labelled(_LABEL, _RANDOM.pack(*words, gauss is not None, gauss or 0.0))


def ordered_items(dataset: keras.utils.PyDataset, indices: Iterator[int]) -> Iterator[Any]:
    """`dataset[i]` for each index, with the workers that the dataset was made with.

    Unlike Keras' own pool, a worker process that fails raises an error here, and does not hang.
    """
    workers, processes = dataset.workers, dataset.use_multiprocessing
    if workers <= 1 and not (processes and workers > 0):
        return _plain(dataset, indices)
    executor: Executor
    if processes:
        executor = ProcessPoolExecutor(workers, initializer=_start, initargs=(dataset,))
    else:
        executor = ThreadPoolExecutor(workers, "ktrainer-feed-worker")
    job: Any = _item if processes else partial(_copied_item, dataset)
    ahead = max(workers, dataset.max_queue_size)
    # Submitted here, in the caller's thread: a fork from a busy background thread is riskier.
    waiting = deque(executor.submit(job, i) for i in itertools.islice(indices, ahead))
    return _pooled(executor, job, indices, waiting)


def _plain(dataset: keras.utils.PyDataset, indices: Iterator[int]) -> Iterator[Any]:
    for index in indices:
        yield _copied_item(dataset, index)


def _copied_item(dataset: keras.utils.PyDataset, index: int) -> Any:
    return copied(dataset[index])


def _pooled(
    executor: Executor, job: Any, indices: Iterator[int], waiting: deque[Future[Any]]
) -> Iterator[Any]:
    try:
        while waiting:
            item = waiting.popleft().result()
            for index in itertools.islice(indices, 1):
                waiting.append(executor.submit(job, index))
            yield item
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start(dataset: Any) -> None:
    global _dataset
    _dataset = dataset


def _item(index: int) -> Any:
    return _dataset[index]
