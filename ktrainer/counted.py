"""What a rank has counted of the epoch so far: its weight in the logs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np


@dataclass
class Counted:
    """What logs of all ranks are made of, metrics' states apart.

    Attributes:
        examples: this rank's, in the epoch so far.
        last: this rank's, in its newest share.
        logs: those of the newest update, perhaps still tensors.
    """

    examples: int = 0
    last: int = 0
    logs: dict[str, Any] = field(default_factory=dict)

    def plain_logs(self) -> dict[str, Any]:
        """The logs as floats, and arrays where they have several numbers."""
        return dict(keras.tree.map_structure(_plain, self.logs or {}))

    def take_over(self, every: list[list[Any]], sources: list[int], counting: list[int]) -> None:
        """Make these the counts of other ranks.

        Args:
            every: (examples, last, logs) of each rank that there was; logs are None where nobody
                knows them.
            sources: the ranks whose sum these are to be.
            counting: the ranks that count at all: where `sources` are not one rank, or its logs are
                not known, these become the mean of those that are.
        """
        self.examples = sum(every[rank][0] for rank in sources)
        self.last = sum(every[rank][1] for rank in sources)
        if len(sources) == 1 and every[sources[0]][2] is not None:
            self.logs = dict(every[sources[0]][2])
            return
        known = [
            (every[rank][1], every[rank][2]) for rank in counting if every[rank][2] is not None
        ]
        if known:
            self.logs = keras.tree.map_structure(
                lambda *values: _mean([w for w, _ in known], values), *[logs for _, logs in known]
            )


def _mean(weights: Sequence[int], values: tuple[Any, ...]) -> Any:
    if not sum(weights):
        return values[0]
    return _plain(np.average(np.array(values, np.float64), axis=0, weights=weights))


def _plain(value: Any) -> Any:
    array = np.array(value.numpy() if hasattr(value, "numpy") else value)
    return float(array) if array.ndim == 0 else array
