"""Large messages in pieces: MPI counts what it sends in 32 bits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

MOST_BYTES = 2**30  # in one message; the limit is 2**31 - 1


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Views of one-dimensional bytes, in order, of at most `MOST_BYTES` each; at least one."""
    return [data[start:stop] for start, stop in spans(data.size)]


def parts_of_object(value: Any) -> list[np.ndarray]:
    """A picklable object as messages: its size, then its bytes in pieces."""
    data = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
    return [np.array([data.size], np.int64), *pieces(data)]


def receive_object(receive: Callable[[list[np.ndarray]], None]) -> Any:
    """An object that is sent as `parts_of_object`.

    Args:
        receive: fills arrays with the next messages, in order.
    """
    size = np.empty(1, np.int64)
    receive([size])
    data = np.empty(int(size[0]), np.uint8)
    receive(pieces(data))
    return pickle.loads(data.data)


def spans(size: int) -> list[tuple[int, int]]:
    """Start and end of each piece of `size` bytes; at least one."""
    starts = range(0, max(1, size), MOST_BYTES)
    return [(start, min(start + MOST_BYTES, size)) for start in starts]
