"""The console's texts: numbers, the headline, and the table at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ktrainer.callbacks.throughput import Rates
from ktrainer.distributed import World
from ktrainer.state.nested_logs import as_floats
from ktrainer.state.progress import Progress

# Names of the values of `watch`, too many for a line, begin so.
_WATCHED = ("norm/", "speed/", "memory/", "communication/")


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
    """`loss 0.1234  accuracy 0.9876`: the loss first, validation last; without watched values."""

    def order(name: str) -> tuple[bool, bool, str]:
        return (name.startswith("val_"), *_loss_first(name.removeprefix("val_")))

    scalars = {k: v for k, v in as_floats(logs).items() if not k.startswith(_WATCHED)}
    return "  ".join(f"{name} {scalars[name]:.4g}" for name in sorted(scalars, key=order))


def _loss_first(name: str) -> tuple[bool, str]:
    return (name != "loss", name)


def headline(model: Any, world: World, trainer: Any, differences: Iterable[str] = ()) -> str:
    """Model, processes and backend; a line per argument of `fit` that a key overrides, and per kind
    of difference from one process.

    Args:
        differences: lines of `known_differences`.
    """
    parameters = count_text(sum(math.prod(v.shape) for v in model.trainable_variables))
    backend = getattr(getattr(getattr(trainer, "config", None), "backend", None), "name", None)
    ranks = "1 process" if world.size == 1 else f"{world.size} processes"
    parts = [f"training {model.name}", f"{parameters} parameters", ranks]
    first = ", ".join([*parts, f"backend {backend}"] if backend else parts)
    more = [*getattr(trainer, "overruled", ()), *differences]
    return "\n".join([first, *(f"  {line}" for line in more)])


def final_report(
    facts: Mapping[str, str],
    epochs: Mapping[int, Mapping[str, float]],
    interrupted: str | None = None,
    stood_out: Sequence[str] = (),
    judged: bool = True,
) -> str:
    """The text at the end of training.

        training finished
          epochs  5
          time    12s
          rank 1 was lost after step 16

          epoch 5   training  validation  best, epoch 4
          loss        0.1234      0.2345         0.2211
          accuracy    0.9876      0.9543         0.9561

    Args:
        facts: by label.
        epochs: logs by epoch, from 0. The best one is that of the lowest `val_loss`; its values
            are those of validation.
        interrupted: what has interrupted it; None: nothing has.
        stood_out: a line for each thing worth a look.
        judged: all epochs' losses of validation are known; else no epoch is called the best.
    """
    width = max(map(len, facts), default=0)
    said = [f"  {label.ljust(width)}  {fact}" for label, fact in facts.items()]
    said += [f"  {line}" for line in stood_out]
    table = _aligned(_metrics_table(epochs, judged))
    first = f"training interrupted by {interrupted}" if interrupted else "training finished"
    return "\n".join([first, *said, *(["", *table] if table else [])])


def epochs_of(history: Any) -> tuple[dict[int, dict[str, float]], bool]:
    """Logs by epoch, from 0, and whether the losses of validation are among them. A
    `keras.callbacks.History` does not say of which epochs a metric is that some do not have."""
    epochs, metrics = getattr(history, "epoch", []), history.history  # set as training begins
    whole = {name: values for name, values in metrics.items() if len(values) == len(epochs)}
    logs = {epoch: {k: v[i] for k, v in whole.items()} for i, epoch in enumerate(epochs)}
    return {epoch: as_floats(each) for epoch, each in logs.items()}, not (
        "val_loss" in metrics and "val_loss" not in whole
    )


def _metrics_table(epochs: Mapping[int, Mapping[str, float]], judged: bool) -> list[list[str]]:
    """A row for each metric below a row of headings; nothing without epochs."""
    if not epochs:
        return []
    last = epochs[max(epochs)]
    columns = {"training": dict(last)}
    losses = ((logs.get("val_loss", math.nan), i) for i, logs in epochs.items())
    known = [(loss, i) for loss, i in losses if not math.isnan(loss)]
    if any(name.startswith("val_") for name in last):
        columns["training"] = {k: v for k, v in last.items() if not k.startswith("val_")}
        columns["validation"] = _of_validation(last)
    if judged and known and len(epochs) > 1:
        _, best = min(known)
        columns[f"best, epoch {best + 1}"] = _of_validation(epochs[best])
    names = sorted({name for values in columns.values() for name in values}, key=_loss_first)
    rows = [
        [name, *(f"{v[name]:.4g}" if name in v else "-" for v in columns.values())]
        for name in names
    ]
    return [[f"epoch {max(epochs) + 1}", *columns], *rows]


def _of_validation(logs: Mapping[str, float]) -> dict[str, float]:
    return {k.removeprefix("val_"): v for k, v in logs.items() if k.startswith("val_")}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns: the first one begins, the others end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]


def summary(
    progress: Progress,
    seconds: float,
    speeds: Sequence[Any],
    size: int,
    first_step: int = 0,
    resumed: bool = False,
) -> dict[str, str]:
    """Facts about the training as a whole, by label.

    Args:
        seconds: of all starts.
        speeds: an `EpochSpeed` for each epoch of this start.
        first_step: where training began in this start, as by `initial_epoch`.
        resumed: there were others before this start.
    """
    said = {
        "epochs": str(progress.epoch),
        "steps": str(progress.step),
        "time": span_text(seconds),
    }
    if progress.examples:
        if first_step:
            said["steps"] += f" (began at {first_step})"
        said["examples"] = count_text(progress.examples)
    since = ["since the resume"] * resumed
    rates = [s.examples_per_second for s in speeds if s.examples_per_second]
    if rates:
        said["examples/s"] = f"{count_text(max(rates))} ({', '.join(['fastest epoch', *since])})"
    fields = {"data wait": "data_wait"}
    if size > 1:
        fields["communication wait"] = "communication_wait"
    for label, field in fields.items():
        waits = [getattr(s, field) for s in speeds if getattr(s, field)]
        if waits:
            per_rank = [sum(rank) for rank in zip(*waits, strict=False)]
            notes = ["by rank"] * (size > 1) + since
            said[label] = ", ".join(map(span_text, per_rank))
            said[label] += f" ({', '.join(notes)})" if notes else ""
    return said
