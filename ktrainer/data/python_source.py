"""Base of sources whose batches are made by Python code."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter_utils import (
    is_scipy_sparse,
    scipy_sparse_to_tf_sparse,
)

from ktrainer.data.batch_source import (
    Piece,
    Source,
    close_iterator,
    compared,
    slicing,
)
from ktrainer.data.batch_specs import require_same_structure, spec_of, widen
from ktrainer.data.data_arguments import class_weights, lists_to_tuples
from ktrainer.data.data_digests import batch_digest
from ktrainer.data.local_batch import count_rows, take_slice
from ktrainer.data.prefetch_thread import Prefetcher, on_device, prefetched
from ktrainer.data.stage_times import StageTimes
from ktrainer.distributed.world import World
from ktrainer.errors import DataError

SAMPLES = 2  # as Keras: dimensions that differ between two batches become variable


class PythonSource(Source):
    """Base of PyDatasets and generators: batches are standardised, sliced and prefetched.

    Args:
        world: this process's replica in it takes the slice.
        sliced: whether all ranks run the same code and each replica takes its slice.
        class_weight: class -> weight, turned into sample weights.
        prefetch: batches kept ready by a background thread; 0: each is made when it is needed, as
            they are where ranks must make the same ones and draw global random numbers for them.
        device: where the next batches are copied to; None: nowhere.
    """

    checked = False

    def __init__(
        self,
        *,
        world: World,
        sliced: bool,
        class_weight: Mapping[int, float] | None,
        prefetch: int,
        device: str | None = None,
    ) -> None:
        self._device = device
        self._replica, self._replicas = slicing(world, sliced)
        self._cut = compared(world, sliced)
        self._class_weight, self._prefetch = class_weight, prefetch
        self._prefetcher: Prefetcher | None = None
        self._draws_globally = False  # whether making a batch does, where that matters
        self._times, self._function = StageTimes(), "the data"
        self._dtypes: list[Any] | None = None

    @contextmanager
    def _reading_samples(self) -> Iterator[None]:
        """The first batches are made inside the block. If that draws from the global generators of
        Python or NumPy, and other ranks make the same ones, no thread makes the later ones: how far
        ahead it is differs between ranks, and so would what else is drawn."""
        before = _global_random_states()
        yield
        self._draws_globally = self._cut and _global_random_states() != before
        if self._draws_globally:
            self._prefetch, self._device = 0, None

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

    def _pieces(self, batches: Iterator[Any]) -> Generator[Piece, None, None]:
        try:
            for batch in self._times.items(batches, self._function):
                with self._times.timed("slicing and comparing batches"):
                    piece = self._piece(self._standard(batch))
                if piece.rows:
                    yield piece
        finally:
            close_iterator(batches)

    def _piece(self, whole: Any) -> Piece:
        rows = count_rows(whole)
        if not (self._cut and rows):
            return Piece(whole, rows)
        digests = tuple(batch_digest(leaf) for leaf in tf.nest.flatten(whole))
        return Piece(take_slice(whole, rows, self._replica, self._replicas), rows, digests)

    def slow_stage(self) -> str | None:
        return self._times.slowest()

    def _ahead(
        self, batches: Iterator[Any], name: str, skip: int = 0
    ) -> Prefetcher | Generator[Piece, None, None]:
        self.close()
        if not self._prefetch:
            pieces = self._pieces(batches)
            deque(itertools.islice(pieces, skip), 0)
            return pieces
        pieces, copy = self._pieces(batches), self._copied if self._device else None
        self._prefetcher = prefetched(pieces, self._prefetch, name, copy, skip)
        return self._prefetcher

    def _copied(self, piece: Piece) -> Piece:
        assert self._device is not None
        return piece._replace(batch=on_device(piece.batch, self._device))

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


def _global_random_states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(words).tobytes(), *rest


def _array(leaf: Any, dtype: tf.DType | None) -> Any:
    """A leaf of a user's batch as a tensor or a NumPy array."""
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    if is_scipy_sparse(leaf):
        return tf.sparse.reorder(scipy_sparse_to_tf_sparse(leaf))
    if isinstance(leaf, (tf.Tensor, tf.Variable)):
        return leaf if dtype in (None, leaf.dtype) else tf.cast(leaf, dtype)
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise DataError(f"a batch holds a single number ({leaf!r}) where rows are expected")
    if array.dtype.kind in "OUS":
        return tf.convert_to_tensor(array, tf.string)
    return array if dtype is None else array.astype(dtype.as_numpy_dtype, copy=False)
