"""Large messages in pieces: MPI counts what it sends in 32 bits."""

from __future__ import annotations

import numpy as np

MOST_BYTES = 2**30  # in one message; the limit is 2**31 - 1


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Views of one-dimensional bytes, in order, of at most `MOST_BYTES` each; at least one."""
    return [data[start : start + MOST_BYTES] for start in range(0, max(1, data.size), MOST_BYTES)]
