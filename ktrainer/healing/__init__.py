"""Training that goes on when ranks die, and when others come.

Data-parallel ranks hold the same state, so a death needs neither a restart nor a checkpoint. Those
that are left agree on who is furthest, take that state, cut the data anew among themselves, and go
on: like a resume from a checkpoint, but from memory, and without leaving `fit`.

    Survival    runs the loop, and mends what a death, or a newcomer, interrupts   survival.py
    Point       a moment that the ranks can go back to                             point.py
    Rollback    variables as they were at that moment                              rollback.py
    Recruiting  starts processes in the place of those that died                   recruiting.py

An update is applied whole or not at all (`GradientPlane.atomic`), so an interrupted one leaves the
weights as they were, and is done again with the same global batch over fewer ranks.
"""

from ktrainer.healing.survival import Healed, Survival

__all__ = ["Healed", "Survival"]
