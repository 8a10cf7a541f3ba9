"""Step time of a pipeline on other numbers of processes, from what its stages took when measured.

actions of each stage, and the update            measured
the bubble                                       `make_timeline`
the slowest replica                              by the spread of steps of all stages
the update's all-reduce over replicas            all_reduce of `Network`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktrainer.backends.pipeline.schedules.actions import Schedule
from ktrainer.backends.pipeline.schedules.timeline import Costs, Timeline, make_timeline
from ktrainer.distributed.rank_layout import Layout
from ktrainer.plan.communication_cost import Cost, Group, Link, Network
from ktrainer.plan_report.scaling_model import (
    VOTE_BYTES,
    Communication,
    Hosts,
    MeasuredStep,
    PredictedStep,
)

_LOGS_MESSAGES = 2  # of a pipeline's last stage to the others: a size, and the logs


@dataclass(frozen=True)
class MeasuredStages:
    """The stages of a pipeline, all of which one process ran for a batch of one replica.

    Attributes:
        step: of all stages; its collectives sum gradients over replicas.
        forward, backward: seconds for a microbatch, by stage.
        parameter_shares: of all parameters, by stage; they add up to 1.
        crossing: bytes of a microbatch over the cut behind each stage but the last.
        sharing_slowdown: how much longer processes take on shared cores than their number on each
            explains.
    """

    step: MeasuredStep
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    parameter_shares: tuple[float, ...]
    crossing: tuple[float, ...]
    sharing_slowdown: float = 1.0


def sharing_slowdown(alone: float, sharing: float, processes: int, places: int) -> float:
    """How much longer processes on shared cores take than their number on each explains.

    Args:
        alone: seconds of a step of processes with cores of their own.
        sharing: seconds of one of so many `processes` on `places`, which TensorFlow's threads and
            the system spread over all of them.
    """
    return max(1.0, sharing / (alone * max(1.0, processes / places)))


def predict_pipeline(
    measured: MeasuredStages,
    layout: Layout,
    schedule: Schedule,
    hosts: Hosts,
    communication: Communication,
) -> PredictedStep:
    """A step of a pipeline, of `layout.replicas` replicas."""
    step, per_host = measured.step, hosts.per_host
    everyone = Group.of(range(layout.size), per_host)
    network = hosts.network(communication.network, everyone.fullest)
    timeline = _timeline(measured, layout, schedule, per_host, network)
    # The processes of a host cannot do more at a time than it has cores for.
    most = max(sum(timeline.busy[p] for p in at) for at in _partitions_by_host(layout, per_host))
    makespan = max(timeline.makespan, most / hosts.places * measured.sharing_slowdown)
    shares = [
        sum(measured.parameter_shares[partition :: schedule.ranks])
        for partition in range(schedule.ranks)
    ]
    actions = schedule.microbatches * (sum(measured.forward) + sum(measured.backward))
    crowding = hosts.crowding(everyone.fullest)
    update = max(0.0, step.seconds - actions) * max(shares) * crowding
    stages = Group.of(layout.model_ranks(0), per_host)
    logs = _LOGS_MESSAGES * network.tree(stages, 0.0).seconds / 2 if stages.ranks > 1 else 0.0
    vote = network.tree(everyone, VOTE_BYTES).seconds if everyone.ranks > 1 else 0.0
    reduced = _over_replicas(measured, layout, shares, per_host, network, communication)
    compute = max(timeline.busy) + update
    bubble = max(0.0, makespan + update - compute) + logs
    added = reduced + vote
    stragglers = (compute + bubble) * (step.slowest_of(layout.replicas) - 1)
    return PredictedStep(
        layout.size,
        everyone.hosts,
        step.batch,
        step.examples,
        compute,
        stragglers,
        added,
        bubble,
        max(0.0, step.input - stragglers - added - bubble),
    )


def _timeline(
    measured: MeasuredStages, layout: Layout, schedule: Schedule, per_host: int, network: Network
) -> Timeline:
    """The actions of a replica, with the messages between its stages."""
    transfers = [
        _link(layout, stage, per_host, network).message(nbytes)
        for stage, nbytes in enumerate(measured.crossing)
    ]
    costs = Costs.of(
        schedule.stages,
        forward=measured.forward,
        backward=measured.backward,
        activation=transfers,
    )
    return make_timeline(schedule, costs)


def _link(layout: Layout, stage: int, per_host: int, network: Network) -> Link:
    """The link of activations from a stage to the next one, in the replica with the slowest."""
    pair = (stage % layout.partitions, (stage + 1) % layout.partitions)
    for replica in range(layout.replicas):
        first, second = (layout.rank_of(partition, replica) // per_host for partition in pair)
        if first != second:
            return network.between
    return network.within


def _partitions_by_host(layout: Layout, per_host: int) -> list[list[int]]:
    """The partitions of the ranks of each host."""
    ranks = range(layout.size)
    return [
        [layout.partition_of(rank) for rank in ranks[first : first + per_host]]
        for first in range(0, layout.size, per_host)
    ]


def _over_replicas(
    measured: MeasuredStages,
    layout: Layout,
    shares: Sequence[float],
    per_host: int,
    network: Network,
    communication: Communication,
) -> float:
    """Seconds to sum the gradients of the largest partition over replicas.

    All partitions do at the same time; those of a host share its link.
    """
    if layout.replicas == 1:
        return 0.0
    largest = max(range(layout.partitions), key=lambda partition: shares[partition])
    group = Group.of(layout.copy_ranks(largest), per_host)
    sharing = max(len(set(at)) for at in _partitions_by_host(layout, per_host))
    total = Cost()
    for each in measured.step.collectives:
        total += communication.cost(each, group, network)
    return (total.processor + total.network * sharing) * shares[largest]
