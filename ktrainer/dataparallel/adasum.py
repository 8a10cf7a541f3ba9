"""Adasum: gradients added such that parallel ones are averaged and orthogonal ones summed.

Of two gradients g1, g2 of a tensor (Maleki et al. 2021, "Scaling Distributed Training with Adaptive
Summation"):

    adasum(g1, g2) = (1 - g1.g2 / (2 |g1|^2)) g1  +  (1 - g1.g2 / (2 |g2|^2)) g2

Of 2^k ranks it is applied to pairs, then to pairs of pairs, and so on, to each tensor by itself:
rank r and rank r xor 2^i exchange their combined gradients in round i. Dot products are computed in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ktrainer.errors import WorldError

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm

_TAG = 72


def adasum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Adasum of two gradients of one tensor, in their type; symmetric up to rounding."""
    a, b = (each.astype(np.float64).reshape(-1) for each in (first, second))
    dot, norm_a, norm_b = a @ b, a @ a, b @ b
    # A gradient of zeros has no direction: the other one is taken whole.
    scale_a = 1 - dot / (2 * norm_a) if norm_a else 1.0
    scale_b = 1 - dot / (2 * norm_b) if norm_b else 1.0
    return (scale_a * a + scale_b * b).astype(first.dtype).reshape(first.shape)


def check_ranks(size: int) -> None:
    """Refuse a number of ranks that Adasum is not defined for.

    Raises:
        WorldError: `size` is no power of two.
    """
    if size & (size - 1):
        raise WorldError(
            f"Adasum combines ranks in pairs, and pairs in pairs, so it needs 2, 4, 8, ... ranks; "
            f"there are {size}. Use op=Average, or another number of ranks."
        )


def adasum_over_ranks(world: MpiComm, arrays: Sequence[np.ndarray], what: str) -> list[np.ndarray]:
    """Adasum of each array over all ranks; bitwise equal on all ranks.

    Args:
        world: a power of two of ranks.
        arrays: floats of the same shapes and types on every rank.
        what: names the operation, should its deadline pass.
    """
    check_ranks(world.size)
    combined = [np.asarray(array, order="C") for array in arrays]
    distance = 1
    while distance < world.size:
        peer = world.rank ^ distance
        theirs = [_swap(world, array, peer, what) for array in combined]
        pairs = zip(combined, theirs, strict=True)
        lower = world.rank < peer  # the same order on both, for equal bits
        combined = [adasum(*((a, b) if lower else (b, a))) for a, b in pairs]
        distance *= 2
    return combined


def _swap(world: MpiComm, array: np.ndarray, peer: int, what: str) -> np.ndarray:
    """The array of another rank, which gets this one's."""
    theirs = np.empty_like(array)
    receive = world.comm.Irecv(theirs.reshape(-1).view(np.uint8), peer, _TAG)
    send = world.comm.Isend(array.reshape(-1).view(np.uint8), peer, _TAG)
    world.wait(receive, what, theirs)
    world.wait(send, what, array)
    return theirs
