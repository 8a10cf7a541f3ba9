"""Where batches come from: the common face of tf.data, PyDatasets and generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ktrainer.errors import DataError
from ktrainer.feed.share import bounds, leaf_names
from ktrainer.feed.shuffling import ShuffleOrder
from ktrainer.world.base import World

_PER_WORKER = (
    "Set data.batch=per_worker, so that each rank trains on whole batches of its own, or "
    "backend=local"
)


class Piece(NamedTuple):
    """What a source yields for one of its batches.

    Attributes:
        batch: this replica's slice of it (the first row, when that is empty), or all of it.
        rows: rows of the whole batch.
        digests: one number per leaf of the whole batch; empty when nobody compares them.
    """

    batch: Any
    rows: int
    digests: tuple[int, ...] = ()


class Source(ABC):
    """Batches of the user's data, epoch by epoch.

    Attributes:
        spec: nested specs of one batch, the batch dimension None; None if the source is empty.
        num_batches: batches an epoch, None when unknown.
        endless: epochs do not begin anew; each goes on where the one before stopped.
        infinite: never runs out.
        reopens: can be opened again from its beginning.
        indexed: an endless source that can be opened anywhere at no cost, once an epoch.
        checked: batches always fit `spec`.
        reorders: each time that it is opened its order may be another.
        openings: iterators that `Model.fit` makes of it for each pass: two where it knows the
            length, but for passes that go over several epochs.
    """

    spec: Any = None
    num_batches: int | None = None
    endless: bool = False
    infinite: bool = False
    reopens: bool = True
    indexed: bool = False
    checked: bool = True
    reorders: bool = False
    openings: int = 1

    @abstractmethod
    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        """The batches of an epoch, or of the endless stream, after the first `skip`."""

    def state(self) -> bytes | None:
        """Where the batches last opened stand, if that says more than how many were taken."""
        return None

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        """Like `open`, in no time: where an iterator stood when `state` told its state."""
        return self.open(epoch, skip)

    def shuffle(self, order: ShuffleOrder) -> bool:
        """Draw batches in this order from here on; whether they can be."""
        return False

    @property
    def order(self) -> ShuffleOrder | None:
        """The order of batches, as it was drawn so far; None where they are not shuffled."""
        return None

    def structure(self) -> str:
        """The names, dtypes and shapes of a batch."""
        return describe(self.spec)

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        """Run none of the user's code in other threads inside the block; gives why that is not so,
        if it is not.

        Args:
            timeout: seconds to wait for a batch that is made now.
        """
        yield None

    def close(self) -> None:  # noqa: B027 - most sources hold nothing that needs closing
        """Stop background work. May be called twice."""


def describe(spec: Any) -> str:
    """A spec as text: `x: float32[None, 4], y: int64[None]`."""
    if spec is None:
        return "nothing"
    leaves = zip(leaf_names(spec), tf.nest.flatten(spec), strict=True)
    return ", ".join(f"{name}: {_describe_leaf(leaf)}" for name, leaf in leaves)


def _describe_leaf(leaf: Any) -> str:
    if leaf is None:
        return "none"
    kind = "" if isinstance(leaf, tf.TensorSpec) else type(leaf).__name__.removesuffix("Spec") + " "
    shape = leaf.shape
    return f"{kind}{leaf.dtype.name}{'[?]' if shape.rank is None else shape.as_list()}"


def slicing(world: World, sliced: bool) -> tuple[int, int]:
    """Which slice of each batch this process takes, and of how many."""
    return (world.replica, world.replicas) if sliced else (0, 1)


def compared(world: World, sliced: bool) -> bool:
    """Whether pieces need digests: other ranks must make the same batches, all of them where each
    takes its slice, else those of this replica."""
    return world.size > 1 if sliced else world.replicas < world.size


def count_rows(batch: Any) -> int:
    """Rows of a batch of concrete tensors or arrays."""
    for leaf in tf.nest.flatten(batch):
        if leaf is not None:
            return int(leaf.shape[0])
    raise DataError("a batch holds no tensors at all")


def require_examples(batch: Any, rank: int, size: int, advice: str = _PER_WORKER) -> None:
    """Refuse to cut a batch whose parts have different first axes, such as nodes and edges.

    Args:
        batch: of concrete tensors or arrays.
        rank, size: which slice is to be cut, and of how many.
        advice: what to do instead, as a sentence without a full stop.

    Raises:
        DataError: naming the first axis of each part.
    """
    counts = [None if leaf is None else tuple(leaf.shape)[:1] for leaf in tf.nest.flatten(batch)]
    if len({count for count in counts if count is not None}) > 1:
        named = zip(leaf_names(batch), counts, strict=True)
        found = {n: c[0] if c else None for n, c in named if c is not None}
        raise not_examples(found, rank, size, advice)


def not_examples(
    counts: dict[str, int | None], rank: int, size: int, advice: str = _PER_WORKER
) -> DataError:
    """The error for a batch that is no list of examples, by the first axis of each part."""
    rows = next(count for count in counts.values())
    start, stop = bounds(rows or 0, rank, size)
    axes = ", ".join(f"{name}: {'no axis' if n is None else n}" for name, n in counts.items())
    return DataError(
        f"a batch cannot be cut into {size} parts by its first axis, which is not examples, as it "
        f"has another length in each array ({axes}): this part, number {rank}, would be "
        f"{stop - start} rows of the first. {advice}"
    )


def take_slice(batch: Any, rows: int, rank: int, size: int) -> Any:
    """This rank's rows of a batch of arrays; its first row if there are none for this rank."""
    if size > 1:
        require_examples(batch, rank, size)
    start, stop = bounds(rows, rank, size)
    if start == stop:
        start, stop = 0, 1
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _rows_of(leaf, start, stop), batch
    )


def _rows_of(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        size = np.array(leaf.dense_shape)
        size[0] = stop - start
        return tf.sparse.slice(leaf, [start] + [0] * (len(size) - 1), size)
    return leaf[start:stop]
