"""Many arrays from one rank to others, in messages of bounded size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ktrainer.world.base import World

BUCKET_BYTES = 16 * 2**20  # bounds the extra host memory; one message carries up to this much


def broadcast_arrays(
    arrays: Sequence[np.ndarray], world: World, root: int = 0, what: str = "arrays"
) -> list[np.ndarray]:
    """The arrays of rank `root`, bitwise, on every rank; on `root` they are those given.

    Args:
        arrays: of the same shapes and dtypes on every rank, which nobody checks here.
        world: the ranks; all of them must call this.
        root: whose values are sent.
        what: names the operation, should its deadline pass.
    """
    named = {str(k): array for k, array in enumerate(arrays)}
    return list(broadcast_chosen(named, named.keys(), world, root, what).values())


def stand_in(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """A read-only array of this shape and dtype that takes no memory: it has no values."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def broadcast_chosen(
    arrays: Mapping[str, np.ndarray],
    keep: Collection[str],
    world: World,
    root: int = 0,
    what: str = "arrays",
) -> dict[str, np.ndarray]:
    """Those arrays of rank `root` that this rank asks for, bitwise.

    They pass by in pieces, so that a rank never has more than it keeps and one message.

    Args:
        arrays: on `root` the arrays; elsewhere stand-ins of the same names, shapes and dtypes,
            in the same order.
        keep: the names that this rank asks for; each rank its own.
        world: the ranks; all of them must call this.
        root: whose values are sent.
        what: names the operation, should its deadline pass.
    """
    here = world.rank == root
    kept = {
        name: array if here else np.empty(array.shape, array.dtype)
        for name, array in arrays.items()
        if name in keep
    }
    if world.size == 1:
        return kept
    for message in _messages({name: array.nbytes for name, array in arrays.items()}):
        if here:
            flat = np.concatenate([_bytes(arrays[name])[a:b] for name, a, b in message])
        else:
            flat = np.empty(sum(b - a for _, a, b in message), np.uint8)
        flat = world.broadcast(flat, root, what)
        at = 0
        for name, a, b in message:
            if name in kept and not here:
                _bytes(kept[name])[a:b] = flat[at : at + b - a]
            at += b - a
    return kept


def _messages(sizes: Mapping[str, int]) -> list[list[tuple[str, int, int]]]:
    """Pieces (name, first byte, end) of at most BUCKET_BYTES in all for each message."""
    messages: list[list[tuple[str, int, int]]] = []
    room = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if room == 0:
                messages.append([])
                room = BUCKET_BYTES
            end = min(size, start + room)
            messages[-1].append((name, start, end))
            room -= end - start
            start = end
    return messages


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of `sizes`, in runs of at most BUCKET_BYTES in all (or one item); 0 is left out."""
    found: list[list[int]] = []
    filled = BUCKET_BYTES
    for i, size in enumerate(sizes):
        if size == 0:
            continue
        if filled + size > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(i)
        filled += size
    return found
