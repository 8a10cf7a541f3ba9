"""Sums of arrays where they are, in pieces.

Buffers of their own would take memory twice over, for sending and for receiving, and MPI some more
for messages under way: no process of a pipeline has room for that beside a large model's gradients,
and copying takes longer than summing. So `reduce_in_pieces` sums large arrays a few pieces at a
time, and only small ones fused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

PIECE_BYTES = 2 * 2**20  # longer ones are no faster, and MPI keeps as much again of each
_SMALL_BYTES = 2**16  # a collective of its own takes longer than copying that much
_UNDER_WAY = 2

Views: TypeAlias = list[np.ndarray]


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
