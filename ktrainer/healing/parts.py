"""Where the part of a script begins and ends in which ranks may die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ktrainer.telling import tell_part
from ktrainer.world.healing import HealingWorld


@contextmanager
def healing_part(world: HealingWorld) -> Iterator[None]:
    """In which the others go on without ranks that die. The launcher is told, as it must end all
    when one dies elsewhere: the others would wait for it, or not notice.

    A rank that leaves speaks for all that it has just agreed with: one of them that dies before it
    can say so itself is missed all the same. One that leaves with an error says nothing: the others
    may go on without it.
    """
    world.parts += 1
    tell_part(world.parts, [world.slot])
    try:
        yield
    except BaseException:
        world.parts += 1
        raise
    world.parts += 1
    tell_part(world.parts, {peer.slot for peer in world.peers})
