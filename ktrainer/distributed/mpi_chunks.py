"""Large messages in pieces: MPI counts what it sends in 32 bits."""

from __future__ import annotations

import numpy as np

MOST_BYTES = 2**30  # in one message; the limit is 2**31 - 1


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Views of one-dimensional bytes, in order, of at most `MOST_BYTES` each; at least one."""
    return [data[start:stop] for start, stop in spans(data.size)]


def spans(size: int) -> list[tuple[int, int]]:
    """Start and end of each piece of `size` bytes; at least one."""
    starts = range(0, max(1, size), MOST_BYTES)
    return [(start, min(start + MOST_BYTES, size)) for start in starts]
