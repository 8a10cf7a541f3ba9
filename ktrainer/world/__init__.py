"""Who else is there: rank, size, host-side collectives, and the gradient plane."""

from __future__ import annotations

from ktrainer.world.base import ReduceOp, SingleWorld, World
from ktrainer.world.detect import current, open_world

__all__ = ["ReduceOp", "SingleWorld", "World", "current", "open_world"]
