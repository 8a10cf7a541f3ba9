"""The shuffle order of arrays, and of the batches of a PyDataset.

If a seed was chosen (`seed` in the configuration, or `keras.utils.set_random_seed` after the
Trainer), it is the order that `Model.fit` draws with it: TensorFlow draws from that seed at the
start of each pass, so it is the same in every epoch. Otherwise each epoch of each `fit` is shuffled
differently, reproducibly by the default seed, which is 0 and not a chosen one; with `seed=null` by
one that is drawn once for all ranks.

The order is a pure function of seed, epoch and position, so that a position is a number and nothing
else has to be saved. Up to `TABLED` rows it is a table, drawn at the start of an epoch. Beyond, it
is computed position by position, so that any position is found at once, in no memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from ktrainer.config import Config
from ktrainer.distributed.world import World
from ktrainer.runtime.tensorflow_setup import seed_is_scripts

_SEEDS = 2**31 - 1  # TensorFlow takes seeds modulo this
TABLED = 1 << 20  # rows; a table of them is drawn in about 10 ms
_BLOCK = 1 << 14  # positions computed together: NumPy calls cost more than their work on a few
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step from seed to seed


class ShuffleOrder(NamedTuple):
    """The order that examples are drawn in.

    Attributes:
        seed: of the order.
        keras: whether it is the order of `Model.fit` under this seed.
        drawn: for batches that Python's `random` orders as in `Model.fit`, the newest epoch that
            was drawn, and the state that it was drawn from.
    """

    seed: int = 0
    keras: bool = False
    drawn: tuple[int, Any] | None = None

    def __str__(self) -> str:
        return f"shuffled by seed {self.seed}" + (" as in Model.fit" if self.keras else "")

    def rows(self, epoch: int, rows: int, batch: int, within_batches: bool) -> Order:
        """The rows in the order of `epoch`: slices of it are int64 arrays of row numbers.

        Args:
            epoch: 0-based.
            rows: how many there are, up to 2**62.
            batch: rows in a batch.
            within_batches: reorder the rows of each batch only.
        """
        if self.keras:
            if within_batches:
                return _keras_rows(self.seed, rows, batch, "batch")
            return _keras_rows(self.seed, rows, rows, True)  # the same for any batch, and faster
        if rows > TABLED:
            key = _mixed(_mixed(np.uint64(self.seed % 2**64)) + np.uint64(epoch))
            return _Blocks(key, rows, batch if within_batches else rows)
        random = np.random.Generator(
            np.random.Philox(key=np.array([self.seed % 2**64, epoch], np.uint64))
        )
        if not within_batches:
            return random.permutation(rows)
        starts = range(0, rows, batch)
        return np.concatenate([s + random.permutation(min(batch, rows - s)) for s in starts])

    def generator(self, epoch: int, row: int) -> np.random.Generator:
        """Random numbers for one row in one epoch, whichever rank reads it."""
        key = np.array([self.seed % 2**64, 2**64 - 1], np.uint64)  # of no epoch's order
        counter = np.array([0, 0, epoch, row], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Order(Protocol):
    """Row numbers by position, of which slices are taken."""

    def __getitem__(self, where: slice, /) -> np.ndarray: ...


class _Blocks:
    """A permutation computed by position, a block of positions at a time.

    Args:
        key: of the permutation.
        rows: the length.
        batch: rows that are reordered among themselves, one such batch after the other.
    """

    def __init__(self, key: np.uint64, rows: int, batch: int) -> None:
        self._key, self._rows, self._batch = key, rows, batch
        self._first, self._block = 0, np.empty(0, np.int64)  # the newest block

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self._rows)
        if not self._first <= start <= stop <= self._first + len(self._block):
            end = min(self._rows, max(stop, start + _BLOCK))
            self._first, self._block = start, self._rows_at(np.arange(start, end))
        return self._block[start - self._first : stop - self._first]

    def _rows_at(self, positions: np.ndarray) -> np.ndarray:
        if self._batch >= self._rows:
            return permuted(positions, self._rows, self._key)
        number, found = positions // self._batch, np.empty_like(positions)
        for batch in range(int(number[0]), int(number[-1]) + 1):  # sorted
            here, start = number == batch, batch * self._batch
            length = min(self._batch, self._rows - start)
            key = _mixed(self._key + np.uint64(batch))
            found[here] = start + permuted(positions[here] - start, length, key)
        return found


def permuted(positions: np.ndarray, length: int, key: np.uint64) -> np.ndarray:
    """Positions after a keyed permutation of `range(length)`.

    A Feistel network over the smallest power of two that holds `length`; what it takes out of the
    range goes through it again until it is inside (cycle walking: Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002).

    Args:
        positions: int64, each in `[0, length)`.
        length: 1 to 2**62.
        key: of the permutation.

    Returns:
        int64, of the same shape.
    """
    if length < 3:
        return positions ^ int(key & np.uint64(1)) if length == 2 else positions.copy()
    bits = (length - 1).bit_length()
    keys = _mixed(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64))
    values = positions.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= np.uint64(length)]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of `range(2**bits)`: in each round one half is changed by a hash of the other.
    The halves swap, widths too, so the number of rounds must be even."""
    high, low = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) >> np.uint64(64 - high))
        high, low = low, high
    return (left << np.uint64(low)) | right


def _mixed(values: Any) -> Any:
    """A hash of 64-bit numbers: the finaliser of splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def order_of(world: World, config: Config, fit: int = 0) -> ShuffleOrder:
    """The order of a call, the same on all ranks: that of rank 0.

    Args:
        fit: how many calls came before; each has an order of its own unless a seed was chosen.
    """
    seed = context.global_seed()
    chosen = config.seed is not None and config.is_set("seed")
    if seed is not None and (chosen or seed_is_scripts()):
        mine = ShuffleOrder(seed % _SEEDS, True)
    elif config.seed is None:
        mine = ShuffleOrder(secrets.randbits(63))
    else:
        later = int(_mixed(np.uint64((config.seed + fit * _GOLDEN) % 2**64))) % 2**63
        mine = ShuffleOrder(later if fit else config.seed)
    return ShuffleOrder(*world.broadcast(tuple(mine), what="agree on the order of the data"))


def _keras_rows(seed: int, rows: int, batch: int, shuffle: bool | str) -> np.ndarray:
    """The indices that Keras' own adapter draws for a pass over arrays."""
    adapter = ArrayDataAdapter(np.arange(rows), batch_size=batch, shuffle=shuffle)
    with _global_seed(seed):
        batches = adapter.get_tf_dataset()
    return np.concatenate([part.numpy() for part in batches])


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Replace TensorFlow's seed in the block; `tf.random.set_seed` would restart its draws."""
    eager = context.context()
    present, eager._seed = eager._seed, seed
    try:
        yield
    finally:
        eager._seed = present
