"""Abstract process group.

A `World` knows this process's rank and moves *host* data between ranks, out of band: it never
shares a channel with the gradients (see `ktrainer.distributed.collectives`), so neither can stall
the other.
Every wait has the deadline `world.deadline`; the error after it names rank, step and operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np

from ktrainer.errors import WorldError
from ktrainer.state.time_shares import COMMUNICATION, TimeShares

ReduceOp = Literal["average", "sum", "min", "max"]


class World(ABC):
    """A group of processes, and this process's rank in it.

    Attributes:
        rank, size: this process's rank, and the number of processes.
        local_rank, local_size: the same on this node.
        replica, replicas: this process's data-parallel rank, and their number; `rank` and `size`,
            unless several processes hold one copy of the model together.
        step: the global step, kept by the loop; named in the messages of waits that fail.
        deadline: seconds that any wait may last.
        deadline_setting: how its user sets that, for error messages.
        times: shares of time, which count its waits as communication; None: nothing does.
        alone: whether this process has yet to join others (`ElasticWorld`).
        heals: whether ranks may be lost and others join while it is in use (`ElasticWorld`).
        interrupted_by: the error that ended a wait before the operation that it was for. Other
            ranks may be in that operation still, and would take this rank's next one for it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    step: int = 0
    deadline: float = 300.0
    deadline_setting: str = "world.deadline"
    name: str = "world"
    heals: bool = False
    alone: bool = False
    interrupted_by: BaseException | None = None
    times: TimeShares | None = None
    _replica: tuple[int, int] | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Context of a wait for other ranks, whose time is counted."""
        times = self.times
        if times is None or not times.in_this_thread:
            return nullcontext()
        return times.of(COMMUNICATION)

    @property
    def stable_rank(self) -> int:
        """A number that this process keeps: its rank, unless ranks change when others are lost."""
        return self.rank

    @property
    def nominal_replicas(self) -> int:
        """The number of replicas, not counting ranks that were lost or have joined since."""
        return self.replicas

    @property
    def replica(self) -> int:
        """This process's data-parallel rank: which slice of a global batch it trains on."""
        return self._replica[0] if self._replica else self.rank

    @property
    def replicas(self) -> int:
        """The number of slices that a global batch is cut into."""
        return self._replica[1] if self._replica else self.size

    @property
    def is_first_replica(self) -> bool:
        """True if this process holds the first replica."""
        return self.size == 1 or self.replica == 0

    def assign_replica(self, replica: int, replicas: int) -> None:
        """Make this process one of those that hold `replica` of `replicas`."""
        self._replica = (replica, replicas)

    @property
    def ranks(self) -> Sequence[int]:
        """Its members' ranks among all processes, in the order of their ranks in this group."""
        return range(self.size)

    def has_lost(self, error: BaseException) -> bool:
        """Return whether an error means a lost rank without which the others can continue."""
        return False

    @property
    def is_root(self) -> bool:
        """True if this process is rank 0, the only one that writes to disk and screen."""
        return self.rank == 0

    @abstractmethod
    def barrier(self, what: str = "barrier") -> None:
        """Wait until all ranks have called it."""

    @abstractmethod
    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        """`value` of rank `root`, on every rank. Any picklable object; a NumPy array, or a list
        of arrays, travels as one message without pickling and must be passed on every rank with
        the same shapes and dtypes."""

    @abstractmethod
    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        """The picklable `value` of every rank, ordered by rank."""

    @abstractmethod
    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        """Reduce a number or array element by element over all ranks, out of band.

        `value` has the same shape and dtype on every rank; the result has that shape, and its
        dtype, but for `average` of integers, which gives float64. Bitwise equal on all ranks.
        """

    def allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "allreduce"
    ) -> np.ndarray:
        """Like `oob_allreduce`; a custom loop's gradients belong in `GradientCollectives`."""
        return self.oob_allreduce(value, op, what)

    def any(self, flag: bool, what: str = "any") -> bool:
        """Return whether `flag` is true on at least one rank."""
        return bool(self.oob_allreduce(np.int32(bool(flag)), "max", what))

    answer_seconds: float = 0.0  # how long before a deadline to call `who_is_missing`

    def answer(self, what: str) -> None:  # noqa: B027 - most worlds make no stall reports
        """Answer stall reports of other ranks: this one waits in `what`. Any thread may call it;
        waits of this world do so by themselves."""

    def who_is_missing(self, what: str) -> str:
        """Make a stall report: ask the other ranks what they do, as this one waits in `what`.

        Returns:
            Sentences for an error message, missing ranks first; empty if ranks cannot be asked.
        """
        return ""

    def record_interruption(self, error: BaseException) -> None:
        """Note that `error` ended a wait before the operation that it was for; the first counts."""
        if self.size > 1 and self.interrupted_by is None:
            self.interrupted_by = error

    def check_usable(self) -> None:
        """Refuse to communicate after a wait has been interrupted.

        Raises:
            WorldError: caused by the error that ended the wait.
        """
        if (error := self.interrupted_by) is not None:
            raise WorldError(
                f"rank {self.rank} can no longer communicate, since it stopped waiting for an "
                "operation that other ranks may still be in: they would get wrong numbers. End "
                f"this process and resume from the last checkpoint. {ended_by(error)}"
            ) from error

    def keep_if_interrupted(self, owner: Any) -> None:  # noqa: B027 - most worlds have no requests
        """Keep `owner`, which holds requests and their memory, for good when a wait is
        interrupted."""

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing that needs closing
        """Release communicators and connections. May be called twice."""


class SingleWorld(World):
    """One process: every collective returns its input."""

    name = "single"

    def barrier(self, what: str = "barrier") -> None:
        pass

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        return value

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        return [value]

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array = np.asarray(value)
        return array.astype(np.float64) if op == "average" and array.dtype.kind in "iub" else array


def ended_by(error: BaseException) -> str:
    """A sentence about the error that ended a wait, without the stacks that it may hold."""
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"The wait was ended by {first_line}"


def for_reduction(
    value: Any, op: ReduceOp
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """`value` as an array that every engine can reduce; and the function that makes the result of
    the reduced one.

    Averages of whole numbers are float64. 16-bit floats, which MPI does not add and of which
    Horovod knows only one kind, travel as float32. For `min` and `max` floats travel as integers
    in the same order, NaN before all others: else the result would depend on which rank has it.
    """
    array = np.asarray(value, order="C")
    if op == "average" and array.dtype.kind in "iub":
        array = array.astype(np.float64)
    dtype, is_float = array.dtype, array.dtype.kind in "fV"
    sent = array.astype(np.float32) if is_float and dtype.itemsize == 2 else array
    wide = sent.dtype
    if is_float and op in ("min", "max"):
        nan = np.copysign(wide.type(np.nan), -1 if op == "min" else 1, dtype=wide)
        sent = _in_order(np.where(np.isnan(sent), nan, sent).view(f"i{wide.itemsize}"))

    def result(reduced: np.ndarray) -> np.ndarray:
        found = reduced if reduced.dtype == wide else _in_order(reduced).view(wide)
        return found.reshape(array.shape).astype(dtype, copy=False)

    return sent, result


def _in_order(bits: np.ndarray) -> np.ndarray:
    """The bits of floats as integers that compare as the floats do; and the reverse. Of negative
    ones, all bits but the sign are flipped."""
    flipped: np.ndarray = bits ^ ((bits >> (8 * bits.itemsize - 1)) & np.iinfo(bits.dtype).max)
    return flipped
