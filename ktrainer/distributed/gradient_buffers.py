"""Host memory for reducing gradients: fused buffers, and sums in place.

Fused buffers are handed to TensorFlow without a copy. It adopts the memory of an aligned array that
a NumPy function returns, and may keep it (an optimizer slot can end up *being* that memory), so a
buffer is reused only once nothing refers to it, which CPython's reference count tells.

Buffers take memory twice over, for sending and for receiving, and MPI some more for messages under
way. No process of a pipeline has room for that beside a large model's gradients, so
`reduce_in_pieces` sums large arrays where they are, a few pieces at a time, and small ones fused.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

ALIGNMENT = 64  # bytes; what Eigen asks for with AVX-512
PIECE_BYTES = 2 * 2**20  # longer ones are no faster, and MPI keeps as much again of each
_SMALL_BYTES = 2**16  # a collective of its own takes longer than copying that much
_UNDER_WAY = 2

Views: TypeAlias = list[np.ndarray]


def _references(buffers: list[np.ndarray], index: int) -> int:
    """References to one buffer, including those of the list and of this very call."""
    return sys.getrefcount(buffers[index])


_IDLE = _references([np.empty(0)], 0)


class BufferPool:
    """Aligned one-dimensional arrays of one length and dtype."""

    def __init__(self, length: int, dtype: np.dtype) -> None:
        self._length, self._dtype = length, np.dtype(dtype)
        self._buffers: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """A buffer that is not referenced elsewhere; its contents are arbitrary."""
        for index in range(len(self._buffers)):
            if _references(self._buffers, index) == _IDLE:
                return self._buffers[index]
        buffer = aligned_empty(self._length, self._dtype)
        self._buffers.append(buffer)
        return buffer


def aligned_empty(length: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts at a multiple of `ALIGNMENT` bytes."""
    nbytes = length * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    # A view of `raw` would make `raw`, not the buffer, the base of every later view of it, and
    # the reference count of the buffer would then say nothing: frombuffer starts a new chain.
    return np.frombuffer(raw[start : start + nbytes].data, dtype)


def offsets(sizes: Sequence[int], itemsize: int) -> list[int]:
    """The start of each of several arrays in one buffer, in elements; the last entry is the end.

    Every start is aligned, so that TensorFlow can adopt each part.
    """
    unit = max(1, ALIGNMENT // itemsize)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // unit) * unit)
    return starts


def reduce_in_pieces(
    arrays: Sequence[np.ndarray],
    start: Callable[[np.ndarray], Any],
    wait: Callable[[Any, np.ndarray], None] = lambda started, buffer: None,
    not_awaited: Callable[[Any, np.ndarray], None] = lambda started, buffer: None,
) -> None:
    """Replace the contents of `arrays` by their sums over ranks.

    Args:
        arrays: contiguous; of the same shapes and dtypes on all ranks.
        start: starts to sum a flat array over ranks, in place; returns what to wait for.
        wait: waits for that, and gets the array too.
        not_awaited: called instead of `wait` for arrays whose sums are under way when an exception
            ends this function.
    """
    under_way: deque[tuple[Any, np.ndarray, Views]] = deque()

    def finish() -> None:
        started, buffer, views = under_way.popleft()
        wait(started, buffer)
        _copy_back(buffer, views)

    try:
        for views in pieces(arrays):
            if len(under_way) == _UNDER_WAY:
                finish()
            buffer = views[0] if len(views) == 1 else np.concatenate(views)
            under_way.append((start(buffer), buffer, views))
        while under_way:
            finish()
    finally:
        for started, buffer, _ in under_way:
            not_awaited(started, buffer)


def _copy_back(buffer: np.ndarray, views: Views) -> None:
    """Copy the sums of a piece back where it was fused from several arrays."""
    if len(views) > 1:
        for view, end in zip(views, np.cumsum([view.size for view in views]), strict=True):
            view[:] = buffer[end - view.size : end]


def pieces(arrays: Sequence[np.ndarray]) -> Iterator[Views]:
    """Flat views that cover `arrays`, each list of one dtype and at most `PIECE_BYTES`: a part
    of a large array, or several small ones."""
    small: dict[np.dtype, Views] = {}
    for array in arrays:
        flat = array.reshape(-1)
        if flat.nbytes > _SMALL_BYTES:
            length = PIECE_BYTES // flat.itemsize
            yield from ([flat[k : k + length]] for k in range(0, flat.size, length))
        elif flat.size:
            views = small.setdefault(flat.dtype, [])
            if sum(view.nbytes for view in views) + flat.nbytes > PIECE_BYTES:
                yield small.pop(flat.dtype)
            small.setdefault(flat.dtype, []).append(flat)
    yield from small.values()
