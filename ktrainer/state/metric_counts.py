"""Metric counts of a rank in the epoch so far: its weight in the logs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ktrainer.state.nested_logs import flatten_paths, unflatten_paths


@dataclass
class MetricCounts:
    """Weights and newest logs, from which logs of all ranks are made with metrics' states.

    Attributes:
        examples: this rank's, in the epoch so far.
        last: this rank's, in its newest local batch.
        of_update: this rank's, in the newest update.
        logs: those of the newest update, perhaps still tensors.
    """

    examples: int = 0
    last: int = 0
    of_update: int = 0
    logs: dict[str, Any] = field(default_factory=dict)

    def plain_logs(self) -> dict[str, Any]:
        """The logs with their scalars as floats; None for what is no scalar, of which only the
        name counts."""
        logs = self.logs or {}
        return unflatten_paths(
            logs, {path: _scalar(value) for path, value in flatten_paths(logs).items()}
        )

    def take_over(self, every: list[list[Any]], sources: list[int], counting: list[int]) -> None:
        """Make these the counts of other ranks.

        Args:
            every: (examples, last, logs) of each rank that there was; logs are None where
                they are not known.
            sources: the ranks whose sum these are to be.
            counting: the ranks that count at all: where `sources` are not one rank, or its logs are
                not known, these become the mean of those that are.
        """
        self.examples = sum(every[rank][0] for rank in sources)
        self.last = sum(every[rank][1] for rank in sources)
        if len(sources) == 1 and every[sources[0]][2] is not None:
            self.logs = dict(every[sources[0]][2])
            return
        known = [every[rank][1:] for rank in counting if every[rank][2] is not None]
        if known:
            weights, logs = zip(*known, strict=True)
            every_leaf = [flatten_paths(each) for each in logs]
            means = {p: _mean(weights, [each.get(p) for each in every_leaf]) for p in every_leaf[0]}
            self.logs = unflatten_paths(logs[0], means)


def _mean(weights: Sequence[int], values: Sequence[float | None]) -> float | None:
    pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None]
    if len(pairs) < len(values):
        return None
    total = sum(w for w, _ in pairs)
    return sum(w * v for w, v in pairs) / total if total else values[0]


def _scalar(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
