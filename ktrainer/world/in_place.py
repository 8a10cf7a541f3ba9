"""Sums over ranks in the memory where arrays are, a piece at a time.

Collectives into buffers of their own need memory twice over, for what is sent and for what
comes, and MPI some more for what is under way. Of a large model's gradients no process of a
pipeline has room for that, so here large arrays go in pieces, of which few are under way at a
time, and small ones together.
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
    wait: Callable[[Any], None],
) -> None:
    """Replace what is in `arrays` by their sums over ranks.

    Args:
        arrays: contiguous; of the same shapes and dtypes on all ranks.
        start: starts to sum a flat array over ranks, in place; returns what to wait for.
        wait: waits for that.
    """
    under_way: deque[tuple[Any, np.ndarray, Views]] = deque()
    for views in pieces(arrays):
        if len(under_way) == _UNDER_WAY:
            _end(*under_way.popleft(), wait)
        buffer = views[0] if len(views) == 1 else np.concatenate(views)
        under_way.append((start(buffer), buffer, views))
    while under_way:
        _end(*under_way.popleft(), wait)


def _end(request: Any, buffer: np.ndarray, views: Views, wait: Callable[[Any], None]) -> None:
    """Wait for a piece, and put it back where it came from several arrays."""
    wait(request)
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
