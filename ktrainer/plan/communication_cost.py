"""Time that collectives take, from latency and bandwidth.

A message of n bytes takes `latency + n * per_byte` (Hockney 1994). For p ranks, an array of n bytes
and the time `add` to sum a byte, with L, b for latency and time a byte of the slowest link:

    exchange   2 L + 4 (p - 1) posts + 2 (p - 1)/p n b + (p - 1)/p n add     the engine `mpi`
    memory     2 L                   + (2 p - 1)/p n b + (p - 1)/p n add     the same, on one host
    rows         L                   + (p + 1) n b                           gather, on one host
    ring       2 (p - 1) L           + 2 (p - 1)/p n b + (p - 1)/p n add     Horovod and NCCL
    tree       2 log2(p) L           + 2 log2(p) n b   + log2(p) n add       Open MPI, in place

The last two are those of Thakur, Rabenseifner and Gropp (2005). `exchange` is `sum_in_place`, which
sums a piece at a time, each rank a segment of it; `memory` is `shared_memory`, with the time of a
barrier for L and that to copy a byte for b. Ranks of one host share its link to the others; with
several ranks on several hosts, `mpi` sums within each host first (`host_groups`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_EXCHANGING = 64  # ranks, as in `ktrainer.distributed.sum_in_place`; more use MPI's all-reduce
PIECE_BYTES = 2 * 2**20  # of a rank that its host's memory takes at a time, as in the same
_SMALL = 65_536  # bytes; Open MPI divides longer arrays into fragments
_FEW_RANKS = 4  # that Open MPI's broadcast serves one by one

Engine = Literal["mpi", "horovod"]


@dataclass(frozen=True)
class Link:
    """A link between two ranks.

    Attributes:
        latency: seconds until a message of no length has arrived.
        per_byte: further seconds for each byte.
    """

    latency: float
    per_byte: float

    def message(self, nbytes: float) -> float:
        """Seconds until a message has arrived."""
        return self.latency + nbytes * self.per_byte


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective.

    Attributes:
        processor: in which the ranks' cores work: they copy and add.
        network: in which they wait for the network between hosts.
    """

    processor: float = 0.0
    network: float = 0.0

    @property
    def seconds(self) -> float:
        return self.processor + self.network

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.processor + other.processor, self.network + other.network)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.processor * factor, self.network * factor)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and their hosts.

    Attributes:
        ranks: how many there are.
        hosts: that they are on.
        fullest: the most of them on one host.
    """

    ranks: int
    hosts: int
    fullest: int

    @classmethod
    def of(cls, ranks: Sequence[int], per_host: int) -> Group:
        """Some ranks of a world of which each host has `per_host` in a row."""
        hosts = Counter(rank // per_host for rank in ranks)
        return cls(len(ranks), len(hosts), max(hosts.values()))

    @property
    def leaders(self) -> Group:
        """One rank of each host."""
        return Group(self.hosts, self.hosts, 1)

    @property
    def on_one_host(self) -> Group:
        """The ranks of the fullest host."""
        return Group(self.fullest, 1, self.fullest)


@dataclass(frozen=True)
class Network:
    """Links between ranks.

    Attributes:
        within: messages between two ranks of a host.
        between: the network, between two hosts. A host has one link to it, for all of its ranks.
        memory: that ranks of a host share: a barrier, and to copy a byte to it or from it.
        post: seconds to start and complete one more message.
        add: seconds to sum a byte.
        crowding: ranks that share a core; 1 where each has its own.
    """

    within: Link
    between: Link
    memory: Link = Link(0.0, 0.0)
    post: float = 0.0
    add: float = 0.0
    crowding: float = 1.0

    def all_reduce(
        self, group: Group, nbytes: float, engine: Engine = "mpi", *, by_host: bool, halves: bool
    ) -> Cost:
        """Sum an array over ranks.

        Args:
            nbytes: in the type in which it is sent.
            by_host: sum within each host first, where that saves traffic.
            halves: it is sent as 16-bit floats, which the engine `mpi` widens within a host.
        """
        if group.ranks == 1:
            return Cost()
        if engine == "horovod":
            return min(
                self.ring(group, nbytes), self.tree(group, nbytes), key=lambda cost: cost.seconds
            )
        if by_host and group.ranks > 2 and 1 < group.hosts < group.ranks:
            here, local = group.on_one_host, nbytes * (2 if halves else 1)
            inside = self._among(here, local, halves=False) + self._broadcast_within(here, nbytes)
            return inside + self._among(group.leaders, nbytes, halves)
        return self._among(group, nbytes, halves)

    def _among(self, group: Group, nbytes: float, halves: bool) -> Cost:
        many = group.ranks > MOST_EXCHANGING
        if many and not halves:
            return self.tree(group, nbytes)
        if group.hosts > 1 or many:
            return self.exchange(group, nbytes)
        return self.through_memory(group, nbytes)

    def through_memory(self, group: Group, nbytes: float) -> Cost:
        """Sum an array as `shared_memory` does: each rank writes what others add up, adds up and
        writes its own segment, and reads the others' sums."""
        segment = nbytes / group.ranks
        copies = (2 * group.ranks - 1) * segment * self.memory.per_byte
        adding = (group.ranks - 1) * segment * self.add
        return Cost((2 * self.memory.latency + copies + adding) * self.crowding)

    def exchange(self, group: Group, nbytes: float) -> Cost:
        """Sum an array as `sum_in_place` does: each rank sums the segments that all others send it,
        and sends them the sum."""
        segment = nbytes / group.ranks
        adding = Cost((group.ranks - 1) * segment * self.add * self.crowding)
        return self._all_to_all(group, segment) * 2 + adding

    def all_gather(self, group: Group, arrays: Sequence[float], engine: Engine = "mpi") -> Cost:
        """Give each rank the arrays of all ranks.

        Args:
            arrays: bytes of each array of a rank. On one host `mpi` copies them through its memory,
                at most `PIECE_BYTES` at a time.
        """
        if group.ranks == 1:
            return Cost()
        if engine == "mpi" and group.hosts == 1 and group.ranks <= MOST_EXCHANGING:
            copies = (group.ranks + 1) * sum(arrays) * self.memory.per_byte
            barriers = math.ceil(sum(arrays) / PIECE_BYTES) * self.memory.latency
            return Cost((barriers + copies) * self.crowding)
        return sum((self._all_to_all(group, nbytes) for nbytes in arrays), Cost())

    def _all_to_all(self, group: Group, segment: float) -> Cost:
        """Each rank sends a segment to each other one."""
        here, away = group.fullest - 1, group.ranks - group.fullest
        copies = here * segment * self.within.per_byte + 2 * (group.ranks - 1) * self.post
        if not away:
            return Cost((self.within.latency + copies) * self.crowding)
        sent = group.fullest * away * segment * self.between.per_byte
        return Cost(copies * self.crowding, self.between.latency + sent)

    def ring(self, group: Group, nbytes: float) -> Cost:
        """Sum an array by passing segments around, twice."""
        if group.ranks == 1:
            return Cost()
        steps, segment = group.ranks - 1, nbytes / group.ranks
        adding = steps * segment * self.add * self.crowding
        if group.hosts == 1:
            return Cost(2 * steps * self.within.message(segment) * self.crowding + adding)
        return Cost(adding, 2 * steps * self.between.message(segment))

    def tree(self, group: Group, nbytes: float) -> Cost:
        """Sum an array towards one rank, and send the sum back, along a binomial tree."""
        all_rounds, here = _rounds(group.ranks), _rounds(group.fullest)
        inside = 2 * here * self.within.message(nbytes) + all_rounds * nbytes * self.add
        across = 2 * (all_rounds - here) * self.between.message(nbytes)
        return Cost(inside * self.crowding, across)

    def _broadcast_within(self, group: Group, nbytes: float) -> Cost:
        """`MPI_Ibcast` of Open MPI: to few ranks one by one, else by a tree or a chain."""
        if group.ranks == 1:
            return Cost()
        if group.ranks <= _FEW_RANKS:
            copies = (group.ranks - 1) * nbytes * self.within.per_byte
            return Cost((self.within.latency + copies) * self.crowding)
        if nbytes < _SMALL:
            return Cost(_rounds(group.ranks) * self.within.message(nbytes) * self.crowding)
        return self._chain(group, nbytes, 8_192 if nbytes < 524_288 else 32_768)

    def _chain(self, group: Group, nbytes: float, fragment: int) -> Cost:
        """Pass fragments along all ranks, several of them under way at a time."""
        fragments = math.ceil(nbytes / fragment)
        hop = self.within.message(nbytes / fragments)
        return Cost((fragments + group.ranks - 2) * hop * self.crowding)


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
