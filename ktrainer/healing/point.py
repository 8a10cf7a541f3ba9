"""A moment of a run that ranks can go back to, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktrainer.feed import ShuffleOrder
from ktrainer.progress import Phase


@dataclass
class Point:
    """What all ranks have in common at a moment between two updates, weights apart.

    Attributes:
        phase: of the step that `progress` counts. The ranks that got furthest have the highest
            (step, phase).
        progress: counters, as a dict.
        told: step and batch up to which all callbacks have heard.
        logs: those of the step, for callbacks that have not heard of them, and for the epoch.
        history: Keras' History, as a dict.
        states, arrays: those of the callbacks, as in a checkpoint.
        stop, late: whether training is to end, by a callback or the clock.
        unsound: whether the last update has spoilt the model.
        started: ranks at the start.
        run_dir: the run's folder.
        shuffle_order: the order of the data.
    """

    phase: Phase = Phase.TOLD
    progress: dict[str, Any] = field(default_factory=dict)
    told: tuple[int, int] = (0, 0)
    logs: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    stop: bool = False
    late: bool = False
    unsound: bool = False
    started: int = 0
    run_dir: str | None = None
    shuffle_order: ShuffleOrder | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The later, the greater."""
        return int(self.progress.get("step", -1)), self.phase
