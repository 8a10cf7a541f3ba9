"""Sums of arrays over ranks, in the memory where the arrays are.

Buffers of their own would take memory twice over, for sending and for receiving: no process of a
pipeline has room for that beside a large model's gradients, and copying takes as long as summing.
So `reduce_in_pieces` sums large arrays a piece at a time, and only small ones fused.

`sum_in_place` sums one piece over the ranks of an MPI communicator:

    each rank gets its segment of the piece from all others     reduce-scatter
    it adds them up, in the order of ranks
    each rank sends its sum to all others                       all-gather

Its messages are non-blocking, so that every wait has a deadline. Open MPI's non-blocking all-reduce
takes twice as long, on two ranks of one host.

Where the order is decided in which ranks are added up:

- `add_up`, by their numbers, each on top of the sum so far: gradients of up to `MOST_RANKS` ranks,
  by messages or in shared memory, and 16-bit ones of any number
- MPI's all-reduce: wider gradients of more ranks, sums in the forward pass, out-of-band sums
- `ktrainer.distributed.host_groups`, where sums are hierarchical: the ranks of a host come first,
  then the hosts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ktrainer.distributed.sixteen_bits import convert

if TYPE_CHECKING:
    from mpi4py import MPI

    from ktrainer.distributed.mpi_communicator import MpiComm

PIECE_BYTES = 2 * 2**20  # longer ones are no faster
_SMALL_BYTES = 2**16  # a collective of its own takes longer than copying that much
MOST_RANKS = 64  # of more, each would have too many messages
_TAG = 1

Views: TypeAlias = list[np.ndarray]


def sum_in_place(world: MpiComm, comm: MPI.Intracomm, array: np.ndarray, what: str) -> None:
    """Replace a flat array by its sum over the ranks of `comm`, with equal bits on all of them.

    16-bit floats are added up in float32; an overflow is an inf.

    Args:
        world: waits, with its deadline.
        comm: a communicator of its ranks, or some of them.
        array: contiguous; of the same length and dtype on all ranks.
        what: what is summed, for messages.
    """
    if comm.size == 1:
        return
    what = f"all-reduce of {what}"
    if comm.size > MOST_RANKS and array.itemsize > 2:
        from mpi4py import MPI

        request = comm.Iallreduce(MPI.IN_PLACE, array)
        world.wait(request, what, array)
        return
    segments = segments_of(array, comm.size)
    mine = segments[comm.rank]
    others = [(comm.rank + k) % comm.size for k in range(1, comm.size)]
    received = {rank: np.empty_like(mine) for rank in others}
    sent = [(rank, segments[rank], received[rank]) for rank in others]
    exchange(world, comm, sent, what)
    add_up(mine, [received.get(rank, mine) for rank in range(comm.size)])
    sent = [(rank, mine, segments[rank]) for rank in others]
    exchange(world, comm, sent, what)


def exchange(
    world: MpiComm,
    comm: MPI.Intracomm,
    messages: Sequence[tuple[int, np.ndarray, np.ndarray]],
    what: str,
) -> None:
    """Send an array to each of some ranks, and receive one from it: (rank, sent, received)."""
    started: list[tuple[Any, np.ndarray]] = []
    try:
        for rank, _, received in messages:
            started.append((comm.Irecv(received.view(np.uint8), rank, _TAG), received))
        for rank, sent, _ in messages:
            started.append((comm.Isend(sent.view(np.uint8), rank, _TAG), sent))
    except Exception as error:  # of MPI: a rank is lost
        started.insert(0, (_NotStarted(error), messages[0][1]))
    try:
        while started:
            request, array = started.pop(0)
            world.wait(request, what, array)
    finally:
        for request, array in started:
            world.keep_unfinished(request, array)


class _NotStarted:
    """A request that could not be made: to wait for it raises what one that failed does."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def Test(self) -> bool:
        raise self._error

    def __bool__(self) -> bool:
        return False


def segments_of(array: np.ndarray, ranks: int) -> Views:
    """The segment of a flat array that each of some ranks adds up."""
    length = -(-array.size // ranks)
    return [array[rank * length : (rank + 1) * length] for rank in range(ranks)]


def weigh(array: np.ndarray, weight: float, to: np.ndarray | None = None) -> None:
    """Write `weight * array` to another array, or in its place; an overflow is an inf."""
    if weight != 1:
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(array, weight, out=array if to is None else to)
    elif to is not None:
        to[:] = array


def add_up(total: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Write the sum of two or more arrays, in their order, into `total`, which is one of them.

    16-bit floats are added up in float32; an overflow is an inf.
    """
    if total.itemsize == 2:
        wide, addend = (np.empty(total.size, np.float32) for _ in range(2))
        convert(parts[0], wide)
        for part in parts[1:]:
            convert(part, addend)
            with np.errstate(over="ignore", invalid="ignore"):
                wide += addend
        convert(wide, total)
        return
    in_place = not any(part is total for part in parts[2:])
    so_far = total if in_place else np.empty_like(total)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(parts[0], parts[1], out=so_far)
        for part in parts[2:]:
            so_far += part
        if not in_place:
            total[:] = so_far


def reduce_in_pieces(arrays: Sequence[np.ndarray], reduce: Callable[[np.ndarray], None]) -> None:
    """Replace the contents of `arrays` by their sums over ranks.

    Args:
        arrays: contiguous; of the same shapes and dtypes on all ranks.
        reduce: sums a flat array over ranks, in place.
    """
    for views in pieces(arrays):
        buffer = views[0] if len(views) == 1 else np.concatenate(views)
        reduce(buffer)
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
