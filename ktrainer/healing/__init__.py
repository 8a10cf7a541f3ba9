"""Training that goes on when ranks die, and when others come.

Data-parallel ranks hold the same state, so a death needs neither a restart nor a checkpoint. Those
that are left agree on who is furthest, take that state, cut the data anew among themselves, and go
on: like a resume from a checkpoint, but from memory, and without leaving `fit`.

    Survival    runs the loop, and mends what a death, or a newcomer, interrupts   survival.py
    Point       a moment that the ranks can go back to                             point.py
    Rollback    variables as they were at that moment                              rollback.py
    Counts      what each rank's metrics have counted, which the others know too   counts.py
    Recruiting  starts processes in the place of those that died                   recruiting.py

What data, callbacks and steps must be like for that is checked in checks.py. Outside the part of a
script that runs like this, a death ends all: parts.py tells the launcher where it begins and ends.

An update is applied whole or not at all (`GradientPlane.atomic`), so an interrupted one leaves the
weights as they were, and is done again with the same global batch over fewer ranks.

Ranks of a hybrid pipeline cannot do each other's work, but replicas of a partition hold the same
state:

    JustInTime  runs the loop; after a death those that are left save, and end     just_in_time.py
    Grid        who had which partition, and who writes it; the writing            saving.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktrainer.healing.just_in_time import JustInTime
from ktrainer.healing.survival import Healed, Survival
from ktrainer.steps.placement import placement_of

if TYPE_CHECKING:
    from ktrainer.fit import Fit
    from ktrainer.loop import Loop
    from ktrainer.world.healing import HealingWorld

__all__ = ["Healed", "JustInTime", "Survival", "survival_of"]


def survival_of(fit: Fit, loop: Loop, world: HealingWorld) -> Survival | JustInTime:
    """What keeps one `fit` going, or saves what is left of it; all ranks make it together.

    Raises:
        DataError, ConfigError: as of `Survival`.
    """
    placement = placement_of(fit.model)
    if placement is None:
        return Survival(fit, loop, world)
    return JustInTime(fit, loop, world, placement)
