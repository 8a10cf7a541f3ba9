"""Who else is there: the interface of a group of processes.

A `World` knows this process's place and moves *host* data between ranks, out of band: it never
shares a channel with the gradients (see `ktrainer.world.plane`), so neither can stall the other.
Every wait has the deadline `world.deadline` and names rank, step and operation when it passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

ReduceOp = Literal["average", "sum", "min", "max"]


class World(ABC):
    """A group of processes, and this process's place in it.

    Attributes:
        rank, size: this process's number in all, and the number of processes.
        local_rank, local_size: the same on this node.
        replica, replicas: which share of the data this process trains on, and how many there
            are; `rank` and `size`, unless several processes hold one copy of the model together.
        step: the global step, kept by the loop; named in the messages of waits that fail.
        deadline: seconds that any wait may last.
        heals: whether ranks may die and others join while it is in use (`HealingWorld`).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    step: int = 0
    deadline: float = 300.0
    name: str = "world"
    heals: bool = False
    _share_of_data: tuple[int, int] | None = None

    @property
    def slot(self) -> int:
        """This process's number for life: its rank, unless ranks change when others die."""
        return self.rank

    @property
    def nominal_replicas(self) -> int:
        """How many shares the data is cut into, but for ranks that have died or joined since."""
        return self.replicas

    @property
    def replica(self) -> int:
        """Which share of the data this process trains on."""
        return self._share_of_data[0] if self._share_of_data else self.rank

    @property
    def replicas(self) -> int:
        """How many shares the data is cut into."""
        return self._share_of_data[1] if self._share_of_data else self.size

    def share_data(self, replica: int, replicas: int) -> None:
        """Let this process take the share of `replica` of `replicas`, as others may too."""
        self._share_of_data = (replica, replicas)

    @property
    def ranks(self) -> Sequence[int]:
        """Who is in it, in the order of ranks: their numbers among all processes."""
        return range(self.size)

    @property
    def is_root(self) -> bool:
        """Whether this process is rank 0, which alone writes to disk and screen."""
        return self.rank == 0

    @abstractmethod
    def barrier(self, what: str = "barrier") -> None:
        """Wait until all ranks have come here."""

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
        """Like `oob_allreduce`; a custom loop's gradients belong in the gradient plane."""
        return self.oob_allreduce(value, op, what)

    def any(self, flag: bool, what: str = "any") -> bool:
        """Whether `flag` is true on at least one rank."""
        return bool(self.oob_allreduce(np.int32(bool(flag)), "max", what))

    answer_seconds: float = 0.0  # how long before a deadline `who_is_missing` is to be called

    def answer(self, what: str) -> None:  # noqa: B027 - most worlds have no one who asks
        """Answer other ranks that ask who is missing: this one waits in `what`. Any thread may
        call it; waits of this world do so by themselves."""

    def who_is_missing(self, what: str) -> str:
        """Ask the other ranks what they are doing, as this one waits in `what`.

        Returns:
            Sentences for an error message, first who does not answer; empty if nobody can be
            asked.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing that needs closing
        """Let go of what this world holds. May be called twice."""


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


def for_reduction(value: Any, op: ReduceOp) -> tuple[np.ndarray, np.dtype]:
    """`value` as an array that every engine can reduce, and the dtype of the result.

    Averages of whole numbers are float64. 16-bit floats, which MPI does not add and of which
    Horovod knows only one kind, travel as float32.
    """
    array = np.ascontiguousarray(value)
    if op == "average" and array.dtype.kind in "iub":
        array = array.astype(np.float64)
    narrow = array.dtype.itemsize == 2 and array.dtype.kind in "fV"
    return (array.astype(np.float32) if narrow else array), array.dtype
