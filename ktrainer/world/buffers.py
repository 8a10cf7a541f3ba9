"""Host buffers for fused collectives, handed to TensorFlow without a copy.

TensorFlow adopts the memory of an aligned array that a NumPy function returns, and may keep it
(an optimizer slot can end up *being* that memory). A buffer is therefore used again only once
nothing refers to it any more, which CPython's reference count tells.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes; what Eigen asks for with AVX-512


def _references(buffers: list[np.ndarray], index: int) -> int:
    """References to one buffer, those of the list and of this very question included."""
    return sys.getrefcount(buffers[index])


_IDLE = _references([np.empty(0)], 0)


class BufferPool:
    """Aligned one-dimensional arrays of one length and dtype."""

    def __init__(self, length: int, dtype: np.dtype) -> None:
        self._length, self._dtype = length, np.dtype(dtype)
        self._buffers: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """A buffer that nobody else holds; its contents are arbitrary."""
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
    """Where each of several arrays starts in one buffer, in elements; the last entry is the end.

    Every start is aligned, so that TensorFlow can adopt each part.
    """
    unit = max(1, ALIGNMENT // itemsize)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // unit) * unit)
    return starts
