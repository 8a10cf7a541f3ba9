"""Recovery of training when ranks are lost, and when others join.

Data-parallel ranks hold the same state, so a lost rank needs neither a restart nor a checkpoint.
The surviving ranks agree on which of them is furthest, take over its state, split the data again,
and continue: like a resume from a checkpoint, but from memory, and without leaving
`fit`. An update is applied whole or not at all (`GradientCollectives.atomic`), so an interrupted
one leaves the weights as they were, and is repeated with the same global batch over fewer ranks.

In a replicated pipeline ranks of different partitions cannot replace each other, but replicas of a
partition hold the same state: the surviving ranks write a checkpoint and end.

    elastic_recovery.py         ElasticRecovery: trains to the end, whatever ranks are lost or join
    joining_policy.py           starts processes to replace lost ranks
    just_in_time_recovery.py    JustInTimeRecovery: trains to the end, or to a last checkpoint
    just_in_time_checkpoint.py  writes that checkpoint
    recovery_point.py           what ranks return to
    requirements.py             what data and callbacks must be for it

Only training survives lost ranks; elsewhere in a script, a lost rank ends the whole launch.
`survivable_section` tells the launcher where training begins and ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.elastic.elastic_recovery import ElasticRecovery
from ktrainer.elastic.just_in_time_recovery import JustInTimeRecovery
from ktrainer.elastic.requirements import check_callbacks, check_data, check_reopened
from ktrainer.steps.variable_placement import placement_of

if TYPE_CHECKING:
    from ktrainer.training.recovery_protocol import Recovery
    from ktrainer.training.run import Run

__all__ = ["ElasticRecovery", "JustInTimeRecovery", "choose_recovery"]


def choose_recovery(run: Run) -> Recovery:
    """The recovery that elastic ranks of `run` can have; all of them call this together.

    Raises:
        DataError: data that cannot be read again in the same order.
        ConfigError: a callback that cannot move to another rank.
    """
    world, state = run.context.world, run.state
    assert isinstance(world, ElasticWorld)
    placement = placement_of(state.model)
    if placement is not None:
        return JustInTimeRecovery(run, world, placement)
    check_data(run.call.data, state.feed)
    check_data(run.call.validation_data, state.validation)
    check_callbacks(run.every)
    if not world.alone:
        check_reopened(run, world)
    return ElasticRecovery(run, world)
