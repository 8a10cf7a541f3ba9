"""Local batches: one rank's rows of a global batch, cut in NumPy or inside a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.errors import DataError

_PER_WORKER = (
    "Set data.batch=per_worker, so that each rank trains on whole batches of its own, or "
    "backend=local"
)


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """The rows that one rank trains on in one step; all ranks of a replica have the same.

    Attributes:
        batch: nested structure, `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, of tensors or
            NumPy arrays: this rank's rows. Never empty: a rank without rows gets a row of padding.
        examples: true rows of this rank; 0 when `batch` is padding.
        global_examples: rows of the whole global batch, summed over all replicas.
    """

    batch: Any
    examples: int
    global_examples: int

    @property
    def is_padding(self) -> bool:
        """True if `batch` is padding only, to be weighted with zero."""
        return self.examples == 0

    def rows(self, part: int = 0, parts: int = 1) -> Any:
        """The true rows of one of several parts of `batch`, as tensors; there may be none."""
        start, stop = bounds(self.examples, part, parts)
        whole = parts == 1 and not self.is_padding

        def of_leaf(leaf: Any) -> Any:
            tensor = leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
            return tensor if whole or leaf is None else _rows_of(tensor, start, stop)

        return tf.nest.map_structure(of_leaf, self.batch)


def bounds(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row, and the one after the last, of `rank`'s contiguous slice of `rows` rows.

    The slices of all ranks, in the order of ranks, are the whole batch. They differ by one row at
    most; earlier ranks have the longer ones.
    """
    base, extra = divmod(rows, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def leaf_names(structure: Any) -> list[str]:
    """A name such as `x`, `x/0` or `y/label` for each leaf, in the order of `tf.nest.flatten`."""
    top = ("x", "y", "sample_weight")
    if isinstance(structure, (tuple, list)) and len(structure) <= len(top):
        parts = list(zip(top, structure, strict=False))
    else:
        parts = [("x", structure)]
    return [name for prefix, part in parts for name in _names(prefix, part)]


def _names(prefix: str, part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key in sorted(part):
            yield from _names(f"{prefix}/{key}", part[key])
    elif isinstance(part, (tuple, list)):
        for i, item in enumerate(part):
            yield from _names(f"{prefix}/{i}", item)
    else:
        yield prefix


def count_rows(batch: Any) -> int:
    """Rows of a batch of concrete tensors or arrays: of its first part, unless that is empty, as
    the edges of a graph without edges, else of the longest."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not leaves:
        raise DataError("a batch holds no tensors at all")
    return _rows(leaves[0]) or max(map(_rows, leaves))


def _rows(leaf: Any) -> int:
    shape = leaf._shape_tuple() if isinstance(leaf, tf.Tensor) else leaf.shape
    return int(shape[0]) if len(shape) else 0


def require_examples(batch: Any, rank: int, size: int, advice: str = _PER_WORKER) -> None:
    """Refuse to cut a batch whose parts have different first axes, such as nodes and edges.

    Args:
        batch: of concrete tensors or arrays.
        rank, size: which slice is to be cut, and of how many.
        advice: what to do instead, as a sentence without a full stop.

    Raises:
        DataError: naming the first axis of each part.
    """
    if not has_examples(batch):
        named = zip(leaf_names(batch), _first_axes(batch), strict=True)
        found = {n: c[0] if c else None for n, c in named if c is not None}
        raise not_examples(found, rank, size, advice)


def has_examples(batch: Any) -> bool:
    """Whether all arrays have the same first axis."""
    return len({axis for axis in _first_axes(batch) if axis is not None}) <= 1


def _first_axes(batch: Any) -> list[tuple[int, ...] | None]:
    return [None if leaf is None else tuple(leaf.shape)[:1] for leaf in tf.nest.flatten(batch)]


def not_examples(
    counts: dict[str, int | None], rank: int, size: int, advice: str = _PER_WORKER
) -> DataError:
    """The error for a batch that is not a list of examples; names the first axis of each part."""
    rows = next(count for count in counts.values())
    start, stop = bounds(rows or 0, rank, size)
    axes = ", ".join(f"{name}: {'no axis' if n is None else n}" for name, n in counts.items())
    return DataError(
        f"a batch cannot be cut into {size} parts by its first axis, which is not examples, as it "
        f"has another length in each array ({axes}): this part, number {rank}, would be "
        f"{stop - start} rows of the first. {advice}"
    )


def take_slice(batch: Any, rows: int, rank: int, size: int) -> Any:
    """This rank's rows of a batch of arrays; the first row, as padding, if it has none. One rank
    alone takes the batch as it is: its arrays may have different first axes."""
    if size == 1:  # what a variable holds now
        return tf.nest.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf,
            batch,
        )
    require_examples(batch, rank, size)
    start, stop = bounds(rows, rank, size)
    if start == stop:
        start, stop = 0, 1
    return _rows_between(batch, start, stop)


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of a batch of arrays; all of it where these have different first axes, as rows
    of one may name rows of another."""
    return _rows_between(batch, 0, rows) if has_examples(batch) else batch


def _rows_between(batch: Any, start: int, stop: int) -> Any:
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _rows_of(leaf, start, stop), batch
    )


def _rows_of(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        size = np.array(leaf.dense_shape)
        size[0] = stop - start
        return tf.sparse.slice(leaf, [start] + [0] * (len(size) - 1), size)
    return leaf[start:stop]


def rows_in_graph(leaf: Any) -> tf.Tensor:
    """The number of rows of a tensor, as an int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def graph_bounds(rows: tf.Tensor, rank: Any, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """`bounds` as TensorFlow ops: the first row, and the number of rows; int64."""
    rank = tf.cast(rank, tf.int64)
    base, extra = rows // size, rows % size
    return rank * base + tf.minimum(rank, extra), base + tf.cast(rank < extra, tf.int64)


def graph_slice(batch: Any, rows: tf.Tensor, rank: Any, size: int) -> Any:
    """`take_slice` as TensorFlow ops; the caller checks that all parts have `rows` rows."""
    start, count = graph_bounds(rows, rank, size)
    start, count = tf.where(count > 0, start, 0), tf.maximum(count, 1)
    stop = start + count

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, tf.SparseTensor):
            return None if leaf is None else leaf[start:stop]
        others = leaf.dense_shape[1:]
        begin = tf.concat([[start], tf.zeros_like(others)], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[count], others], 0))

    return tf.nest.map_structure(of_leaf, batch)
