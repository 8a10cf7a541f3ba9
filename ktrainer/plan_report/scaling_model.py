"""Step time on other numbers of processes, from what steps of one process were measured to take.

    step of one process, on its part of a batch      measured
    the slowest of all                               by the spread of its steps
    its collectives, each from when it starts        by the formulas of `Network`

Waits for the network overlap with the rest of a step as they do in it: a bucket of gradients is
sent once its last gradient is there and the bucket before has arrived. Copies between ranks of a
host overlap with nothing, since the cores make them. Steps are timed with up to two processes on
the cores of one; more take as many times longer as the fullest cores have more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ktrainer.plan.communication_cost import Cost, Engine, Group, Network

VOTE_BYTES = 16.0  # of the message, at the end of each step, on whether to stop


@dataclass(frozen=True)
class Collective:
    """A collective of a step, as one process alone ran it.

    Attributes:
        kind: "reduce" of gradients; "gather" of sparse ones; "sum" of numbers in the forward pass,
            which waits for it.
        at: seconds after the step began.
        seconds: that it took alone: to weigh gradients and pack small ones.
        pieces: bytes of each piece that is summed; or of the number of rows, values and indices.
        halves: they are sent as 16-bit floats.
    """

    kind: Literal["reduce", "gather", "sum"]
    at: float
    seconds: float
    pieces: tuple[float, ...]
    halves: bool = False


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one process.

    Attributes:
        batch: its rows.
        examples: rows of all processes.
        seconds: the step's.
        input: seconds of waiting for a batch.
        collectives: in order.
        slowdowns: of each step that was timed, of all processes that did: times of `seconds`.
        crowding: processes on the fullest place for one while it was timed.
    """

    batch: float
    examples: float
    seconds: float
    input: float
    collectives: tuple[Collective, ...] = ()
    slowdowns: tuple[float, ...] = (1.0,)
    crowding: int = 1

    def slowest_of(self, processes: int) -> float:
        """The median slowdown of the slowest of so many processes, each of which is as slow in one
        step as in another: what all wait for."""
        ordered = sorted(self.slowdowns)
        place = math.ceil(0.5 ** (1 / processes) * len(ordered)) - 1
        return max(1.0, ordered[min(place, len(ordered) - 1)])


@dataclass(frozen=True)
class Hosts:
    """The hosts that are planned for.

    Attributes:
        per_host: the most processes on one.
        cores: of one.
        threads: of a process.
    """

    per_host: int
    cores: int
    threads: int

    @property
    def places(self) -> int:
        """Processes of which each has cores of its own."""
        return max(1, self.cores // self.threads)

    def crowding(self, on_host: int) -> int:
        """Processes on the fullest place for one."""
        return math.ceil(on_host / self.places)

    def measured_at_once(self, processes: int, here: Hosts) -> int:
        """How many processes of a host are timed at once, for so many in all: they share cores
        where those planned for do, if the hosts have processes enough.

        Args:
            here: the hosts on which they are.
        """
        on_host = min(processes, self.per_host)
        most = here.per_host if self.crowding(on_host) > 1 else here.places
        return min(on_host, here.per_host, most)

    def network(self, given: Network, on_host: int) -> Network:
        """The network of so many processes on a host, which share its cores to copy and add."""
        crowding = max(1.0, on_host / self.cores)
        return replace(given, crowding=crowding)


@dataclass(frozen=True)
class PredictedStep:
    """A step of several processes; its times are in seconds and add up to it.

    Attributes:
        batch: rows of a replica.
        examples: rows of all replicas.
        compute: of the busiest process.
        stragglers: the wait for the slowest process.
        communication: what all collectives add, the vote on whether to stop among them.
        bubble: the wait of the busiest process for other stages.
        input: the wait for a batch.
    """

    processes: int
    hosts: int
    batch: float
    examples: float
    compute: float
    stragglers: float
    communication: float
    bubble: float
    input: float

    @property
    def seconds(self) -> float:
        waits = (self.stragglers, self.communication, self.bubble, self.input)
        return sum(waits, start=self.compute)

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds


@dataclass(frozen=True)
class Communication:
    """How gradients are summed.

    Attributes:
        network: between the ranks.
        engine: that sums.
        by_host: within each host first, where that saves traffic.
    """

    network: Network
    engine: Engine = "mpi"
    by_host: bool = True

    def cost(self, each: Collective, group: Group, network: Network) -> Cost:
        """Cost of a collective among `group`."""
        if each.kind == "gather":
            return network.all_gather(group, each.pieces, self.engine)
        total = Cost()
        for nbytes in each.pieces:
            if each.kind == "sum":
                total += network.tree(group, nbytes)
            else:
                total += network.all_reduce(
                    group, nbytes, self.engine, by_host=self.by_host, halves=each.halves
                )
        return total


def predict(
    step: MeasuredStep, processes: int, hosts: Hosts, communication: Communication
) -> PredictedStep:
    """A data-parallel step of so many processes."""
    group = Group.of(range(processes), hosts.per_host)
    network = hosts.network(communication.network, group.fullest)
    crowding = hosts.crowding(group.fullest) / step.crowding
    compute = step.seconds * crowding
    ended = with_collectives(
        compute,
        [_slower(each, crowding) for each in step.collectives],
        lambda each: communication.cost(each, group, network),
    )
    vote = network.tree(group, VOTE_BYTES).seconds if processes > 1 else 0.0
    added = ended - compute + vote
    stragglers = compute * (step.slowest_of(processes) - 1)
    return PredictedStep(
        processes,
        group.hosts,
        step.batch,
        step.examples,
        compute,
        stragglers,
        added,
        0.0,
        # Batches are made ahead, in the time of communication too.
        max(0.0, step.input * crowding - added - stragglers),
    )


def _slower(each: Collective, factor: float) -> Collective:
    return Collective(each.kind, each.at * factor, each.seconds * factor, each.pieces, each.halves)


def with_collectives(
    seconds: float, collectives: Sequence[Collective], cost_of: Callable[[Collective], Cost]
) -> float:
    """The end of a step that took `seconds` with collectives that cost nothing.

    They run one after another. The step continues while one of gradients waits for the network;
    after the last, all that had followed it follows it still.
    """
    delay = end = after = 0.0
    for each in collectives:
        cost = cost_of(each)
        end = max(each.at + delay, end) + each.seconds + cost.seconds
        delay += cost.processor
        if each.kind == "sum":
            delay = max(delay, end - each.at - each.seconds)
        after = seconds - each.at - each.seconds
    return max(seconds + delay, end + after)
