"""Numbers as people like to read them, and the speed of training."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ktrainer.progress import Progress
from ktrainer.world import World

Rates = tuple[float | None, ...]  # steps and examples per second


class Meter:
    """Steps and examples per second, over the last few seconds."""

    WINDOW = 5.0  # seconds

    def __init__(self) -> None:
        self._marks: list[tuple[float, int, int]] = []
        self._last: Rates = (None, None)  # shown while there is nothing newer
        self._epoch: tuple[int, int] = (0, 0)

    def reset(self, progress: Progress) -> None:
        """Begin anew: what came before (validation, compilation) must not count."""
        self._last = self.rates
        self._epoch = (progress.step, progress.examples)
        self._marks = [(time.perf_counter(), progress.step, progress.examples)]

    def update(self, progress: Progress) -> None:
        """Look at the clock after a step."""
        now = time.perf_counter()
        self._marks.append((now, progress.step, progress.examples))
        while len(self._marks) > 2 and now - self._marks[1][0] > self.WINDOW:
            self._marks.pop(0)

    @property
    def rates(self) -> Rates:
        """(steps, examples) per second; None when unknown."""
        if len(self._marks) < 2:
            return self._last
        (t0, s0, e0), (t1, s1, e1) = self._marks[0], self._marks[-1]
        seconds = max(t1 - t0, 1e-9)
        return (s1 - s0) / seconds, ((e1 - e0) / seconds if e1 > e0 else None)

    @property
    def steps_per_second(self) -> float | None:
        return self.rates[0]

    def of_epoch(self, progress: Progress, seconds: float) -> Rates:
        """(steps, examples) per second since `reset`."""
        steps, examples = progress.step - self._epoch[0], progress.examples - self._epoch[1]
        seconds = max(seconds, 1e-9)
        return steps / seconds, (examples / seconds if examples else None)


def span_text(seconds: float) -> str:
    """`0.8s`, `12s`, `3m 05s`, `2h 07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def count_text(value: float) -> str:
    """`832`, `25.1k`, `2.9M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def rate_text(rates: Rates) -> str:
    """`151 steps/s  25.1k examples/s`."""
    named = zip(rates, ("steps/s", "examples/s"), strict=False)
    return "  ".join(f"{count_text(r)} {name}" for r, name in named if r is not None)


def metrics_text(logs: Mapping[str, Any]) -> str:
    """`loss 0.1234  accuracy 0.9876`: the loss first, validation last."""

    def order(name: str) -> tuple[bool, bool, str]:
        return (name.startswith("val_"), name.removeprefix("val_") != "loss", name)

    return "  ".join(f"{name} {logs[name]:.4g}" for name in sorted(logs, key=order))


def headline(model: Any, world: World, trainer: Any) -> str:
    """What runs, and on what; which arguments of `fit` the configuration wins over."""
    parameters = count_text(sum(math.prod(v.shape) for v in model.trainable_variables))
    backend = getattr(getattr(getattr(trainer, "config", None), "backend", None), "name", None)
    ranks = "1 process" if world.size == 1 else f"{world.size} processes"
    parts = [f"training {model.name}", f"{parameters} parameters", ranks]
    first = ", ".join([*parts, f"backend {backend}"] if backend else parts)
    return "\n".join([first, *(f"  {line}" for line in getattr(trainer, "overruled", ()))])


def summary(
    progress: Progress,
    seconds: float,
    epochs: Mapping[int, Mapping[str, float]],
    speeds: Sequence[Any],
    size: int,
) -> dict[str, str]:
    """What to say when training has ended, by label."""
    said = {
        "epochs": str(progress.epoch),
        "steps": str(progress.step),
        "time": span_text(seconds),
    }
    if progress.examples:
        said["examples"] = count_text(progress.examples)
    rates = [s.examples_per_second for s in speeds if s.examples_per_second]
    if rates:
        said["examples/s"] = f"{count_text(max(rates))} in the fastest epoch"
    fields = {"data wait": "data_wait"}
    if size > 1:
        fields["communication wait"] = "communication_wait"
    for label, field in fields.items():
        waits = [getattr(s, field) for s in speeds if getattr(s, field)]
        if waits:
            per_rank = [sum(rank) for rank in zip(*waits, strict=False)]
            said[label] = ", ".join(span_text(wait) for wait in per_rank) + (
                " (by rank)" if size > 1 else ""
            )
    if epochs:
        said["last epoch"] = metrics_text(epochs[max(epochs)])
    losses = [(e["val_loss"], i + 1) for i, e in epochs.items() if "val_loss" in e]
    if losses:
        value, number = min(losses)
        said["best val_loss"] = f"{value:.4g} in epoch {number}"
    return said
