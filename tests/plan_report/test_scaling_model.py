"""Predicted steps: overlap of collectives with a step, processes that share cores, the bubble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import ConfigError
from ktrainer.plan.communication_cost import Cost, Link, Network
from ktrainer.plan_report.pipeline_scaling_model import (
    MeasuredStages,
    predict_pipeline,
    sharing_slowdown,
)
from ktrainer.plan_report.scaling_model import (
    Collective,
    Communication,
    Hosts,
    MeasuredStep,
    predict,
    with_collectives,
)
from ktrainer.plan_report.scaling_report import chosen_worlds

FREE = Communication(Network(Link(0.0, 0.0), Link(0.0, 0.0)))
SLOW = Communication(Network(Link(0.0, 0.0), Link(0.0, 1e-6)))


def simulated(collectives, costs, seconds=10.0, tick=1e-3):
    """The end of a step, in ticks of a core that computes or copies, and of a network.

    The step needs all results when it comes to where the last collective started.
    """
    queue = [(each.at, cost) for each, cost in zip(collectives, costs, strict=True)]
    needs_all, near = queue[-1][0], tick / 2
    work = copying = wire = ticks = 0.0
    while work < seconds - near or queue:
        if queue and max(copying, wire) < near and work > queue[0][0] - near:
            _, cost = queue.pop(0)
            copying, wire = cost.processor, cost.network
        waits = work > needs_all - near and (queue or wire > near)
        if copying > near:
            copying -= tick
        else:
            wire -= tick if wire > near else 0
            work += 0 if waits else tick
        ticks += 1
    return ticks * tick


@pytest.mark.parametrize(
    "at, costs",
    [
        ([8], [Cost(1, 3)]),
        ([4, 8], [Cost(0, 2), Cost(0, 2)]),  # the first is hidden
        ([4, 8], [Cost(0, 6), Cost(0, 2)]),  # the second waits for it
        ([4, 6, 8], [Cost(1, 1), Cost(1, 1), Cost(1, 1)]),
        ([2, 4, 8], [Cost(0, 9), Cost(2, 1), Cost(0, 0.5)]),
    ],
)
def test_collectives_overlap_with_the_step(at, costs):
    collectives = [Collective("reduce", start, 0.0, ()) for start in at]
    by_each = dict(zip(collectives, costs, strict=True))
    found = with_collectives(10.0, collectives, by_each.__getitem__)
    assert found == pytest.approx(simulated(collectives, costs), abs=0.02)


def test_closed_forms_of_overlap():
    one = [Collective("reduce", 8.0, 0.5, ())]
    assert with_collectives(10.0, [], lambda each: Cost(1, 1)) == 10.0
    assert with_collectives(10.0, one, lambda each: Cost(1, 3)) == 14.0
    # The forward pass waits for its sums, and all that follows is later.
    early = [Collective("sum", 1.0, 0.0, ()), Collective("reduce", 8.0, 0.5, ())]
    assert with_collectives(10.0, early, lambda each: Cost(0, 3)) == 16.0


def step(seconds=0.01, input=0.0, nbytes=0.0):
    reduce = (Collective("reduce", seconds, 0.0, (nbytes,)),) if nbytes else ()
    return MeasuredStep(64, 256, seconds, input, reduce)


def test_processes_that_share_cores():
    hosts = Hosts(per_host=4, cores=2, threads=1)
    for processes, times in ((1, 1), (2, 1), (3, 2), (4, 2)):
        found = predict(step(), processes, hosts, FREE)
        assert found.compute == found.seconds == pytest.approx(0.01 * times)
        assert found.hosts == 1
    # Timed while two shared a core; eight take turns more often.
    crowded, larger = replace(step(), crowding=2), replace(hosts, per_host=8)
    for processes, times in ((3, 1), (4, 1), (8, 2)):
        assert predict(crowded, processes, larger, FREE).seconds == pytest.approx(0.01 * times)
    assert predict(step(), 8, hosts, FREE).hosts == 2
    assert predict(step(), 2, Hosts(4, 2, 2), FREE).compute == pytest.approx(0.02)


def test_steps_are_timed_on_shared_cores_where_those_planned_for_share_theirs():
    laptop = Hosts(per_host=4, cores=2, threads=1)

    def timed(hosts):
        return [hosts.measured_at_once(processes, laptop) for processes in (1, 2, 3, 8)]

    assert timed(laptop) == [1, 2, 3, 4]
    assert timed(Hosts(8, 2, 1)) == [1, 2, 3, 4]
    assert timed(Hosts(8, 8, 1)) == [1, 2, 2, 2]
    assert timed(Hosts(1, 2, 1)) == [1] * 4


def test_the_input_is_made_during_the_all_reduce():
    hosts = Hosts(1, 1, 1)
    found = predict(step(input=0.004, nbytes=1000.0), 2, hosts, SLOW)
    reduced = 2 * 500e-6 + 2 * 16e-6  # and the vote on whether to stop
    assert found.communication == pytest.approx(Cost(0, reduced).seconds)
    assert found.input == pytest.approx(0.004 - reduced)
    assert found.seconds == pytest.approx(0.014)
    assert found.examples_per_second == pytest.approx(256 / 0.014)
    assert predict(step(input=0.001, nbytes=1000.0), 2, hosts, SLOW).input == 0


def test_all_wait_for_the_slowest():
    slow = replace(step(), slowdowns=(1.0, 0.9, 1.0, 1.1, 1.4, 1.0, 1.0, 1.2, 1.0, 0.9))
    # Half of all steps have none of two above the 71st percentile, of 8 above the 92nd.
    for processes, slowdown in ((1, 1.0), (2, 1.1), (4, 1.2), (8, 1.4), (1024, 1.4)):
        assert slow.slowest_of(processes) == slowdown
        found = predict(slow, processes, Hosts(1, 1, 1), FREE)
        assert found.stragglers == pytest.approx(0.01 * (slowdown - 1))
        assert found.seconds == pytest.approx(0.01 * slowdown)


def stages(partitions, nbytes=0.0):
    forward, backward, update = 0.001, 0.002, 0.004
    seconds = 4 * partitions * (forward + backward) + update
    return MeasuredStages(
        step(seconds, nbytes=nbytes),
        (forward,) * partitions,
        (backward,) * partitions,
        (1 / partitions,) * partitions,
        (100.0,) * (partitions - 1),
    )


@pytest.mark.parametrize("partitions", [2, 4])
def test_the_bubble_of_equal_stages(partitions):
    schedule, hosts = make_schedule("1f1b", partitions, 4), Hosts(8, 8, 1)
    found = predict_pipeline(stages(partitions), Layout(partitions), schedule, hosts, FREE)
    assert found.compute == pytest.approx(4 * 0.003 + 0.004 / partitions)
    assert found.bubble == pytest.approx((partitions - 1) * 0.003)
    assert found.communication == 0
    # On one core nothing is gained, and the update takes as long as in one process.
    alone = predict_pipeline(stages(partitions), Layout(partitions), schedule, Hosts(8, 1, 1), FREE)
    assert alone.seconds == pytest.approx(4 * partitions * 0.003 + 0.004)
    # Where processes share a core, their actions take longer, by what sharing it costs.
    slower = replace(stages(partitions), sharing_slowdown=1.2)
    shared = predict_pipeline(slower, Layout(partitions), schedule, Hosts(8, 1, 1), FREE)
    assert shared.seconds == pytest.approx(1.2 * 4 * partitions * 0.003 + 0.004)
    assert predict_pipeline(slower, Layout(partitions), schedule, hosts, FREE) == found


@pytest.mark.parametrize(("processes", "places"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_what_sharing_cores_costs(processes, places):
    fair = 0.01 * processes / places
    assert sharing_slowdown(0.01, 1.2 * fair, processes, places) == pytest.approx(1.2)
    assert sharing_slowdown(0.01, 0.9 * fair, processes, places) == 1.0


def test_replicas_of_a_pipeline():
    schedule, measured = make_schedule("1f1b", 2, 4), stages(2, nbytes=8000.0)
    cluster = predict_pipeline(measured, Layout(2, 2), schedule, Hosts(2, 2, 1), SLOW)
    # Two partitions of half the gradients share the link of a host.
    vote = 2 * 16e-6
    assert cluster.communication == pytest.approx(2 * 4000e-6 + vote)
    spread = predict_pipeline(measured, Layout(2, 2, "spread"), schedule, Hosts(2, 2, 1), SLOW)
    assert spread.communication == pytest.approx(vote)
    # There, activations cross between the hosts instead: the first and the last wait for them.
    assert spread.bubble - cluster.bubble > 2 * 100e-6


def test_the_numbers_of_processes():
    assert chosen_worlds([1], 1) == [1]
    assert chosen_worlds([10], 1) == [1, 2, 4, 8, 10]
    assert chosen_worlds([1024], 1) == [2**k for k in range(11)]
    assert chosen_worlds([12], 3) == [3, 6, 12]
    assert chosen_worlds([2, 6], 2) == [2, 6]
    with pytest.raises(ConfigError, match=r"7 processes are no multiple of 2 .* ask for 6"):
        chosen_worlds([7], 2)
