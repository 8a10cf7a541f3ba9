"""Many arrays from one rank to all others, in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktrainer.world.base import World

BUCKET_BYTES = 64 * 2**20  # bounds the extra host memory; one message carries up to this much


def broadcast_arrays(
    arrays: Sequence[np.ndarray], world: World, root: int = 0, what: str = "arrays"
) -> list[np.ndarray]:
    """The arrays of rank `root`, bitwise, on every rank.

    Args:
        arrays: of the same shapes and dtypes on every rank, which nobody checks here.
        world: the ranks; all of them must call this.
        root: whose values are sent.
        what: names the operation, should its deadline pass.
    """
    received = list(arrays)
    for bucket in _buckets([array.nbytes for array in arrays]):
        flat = np.concatenate([_bytes(arrays[i]) for i in bucket])
        flat = world.broadcast(flat, root, what)
        ends = np.cumsum([arrays[i].nbytes for i in bucket])
        for i, part in zip(bucket, np.split(flat, ends[:-1]), strict=True):
            # The copy is aligned, as a view into the middle of the message need not be.
            received[i] = part.copy().view(arrays[i].dtype).reshape(arrays[i].shape)
    return received


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of `sizes`, in runs of at most BUCKET_BYTES in all (or one item); 0 is left out."""
    buckets: list[list[int]] = []
    filled = BUCKET_BYTES
    for i, size in enumerate(sizes):
        if size == 0:
            continue
        if filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += size
    return buckets
