"""Data of a report's page, as JSON-able values: curves, marks and shares of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ktrainer.runs.run_curves import Curve, Point, RowAxes, is_number, row_axes, run_curves
from ktrainer.runs.run_marks import Mark, run_marks, run_spans
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import RETURNS, Event, place, spelled
from ktrainer.state.time_shares import WAITING

MOST_MARKS = 100  # of a kind that are drawn
MOST_RANKS = 64  # whose time is drawn
MOST_TIMES = 60  # rows of shares of time; neighbouring epochs are added up to as many
_WALL = "seconds"
_LEFT = "not attributed"

Epoch = tuple[int, int]  # the call of `fit`, and its epoch
Shares = dict[str, dict[str, float]]  # seconds by rank, by what they were spent on


def page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """All that is drawn, of all runs, and the `fit` that is shown first; NaN and infinities are
    strings."""
    names = run_names(records)
    runs = [_of_run(record, name) for record, name in zip(records, names, strict=True)]
    shares = [time_shares(record) for record in records]
    groups = _epoch_groups(epoch for each in shares for epoch, _ in each)
    for run, each in zip(runs, shares, strict=True):
        run["times"] = _drawn_times(each, groups)
    return {"runs": spelled(runs), "fit": _shown_fit([list(run["fits"]) for run in runs])}


def _shown_fit(fits: Sequence[Sequence[str]]) -> str:
    """The last of the script's calls of `fit` that all runs with values have, else the last."""
    known = [[name for name in names if "," not in name] for names in fits if names]
    common = [name for name in known[0] if all(name in each for each in known)] if known else []
    every = [name for each in [*known, *fits] for name in each]
    return (common or every or ["1"])[-1]


def run_names(records: Sequence[RunRecord]) -> list[str]:
    """The shortest ends of the runs' paths that tell them apart."""
    paths = [Path(record.folder).absolute().parts for record in records]
    for length in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{parts[-1]} ({number})" for number, parts in enumerate(paths, 1)]


def fit_name(fit: tuple[int, int]) -> str:
    """`1`, or `1, inside 2` for a fit that a callback has called."""
    return f"{fit[0]}, inside {fit[1]}" if fit[1] else str(fit[0])


def _of_run(record: RunRecord, name: str) -> dict[str, Any]:
    marks = _fewer_marks(run_marks(record))
    spans = run_spans(record)
    begin = min((each.begin for each in spans), default=0.0)
    fits: dict[tuple[int, int], list[Event]] = {}
    for row in record.rows:
        fits.setdefault(place(row), []).append(row)
    return {
        "name": name,
        "fits": {fit_name(fit): _of_fit(record, fit, fits[fit], marks) for fit in sorted(fits)},
        "begin": begin,
        "spans": [[each.kind, each.begin - begin, each.end - begin] for each in spans],
        "marks": [
            {"kind": mark.kind, "text": mark.text, "time": round(mark.time - begin, 3)}
            for mark in marks
            if mark.time is not None
        ],
    }


def _fewer_marks(marks: Sequence[Mark]) -> list[Mark]:
    """All marks, but of many of a kind some, spread evenly, with the last."""
    kinds: dict[str, list[Mark]] = {}
    for mark in marks:
        kinds.setdefault(mark.kind, []).append(mark)
    kept = {id(mark) for same in kinds.values() for mark in same[:: -len(same) // MOST_MARKS]}
    return [mark for mark in marks if id(mark) in kept]


def has_many_marks(record: RunRecord) -> bool:
    """Whether some marks of a run are not drawn."""
    marks = run_marks(record)
    return len(_fewer_marks(marks)) < len(marks)


# -- curves


def _of_fit(
    record: RunRecord, fit: tuple[int, int], rows: Sequence[Event], marks: Iterable[Mark]
) -> dict[str, Any]:
    starts = [start for start in record.starts if place(start) == fit]
    counted = {id(row) for row in rows}
    events = [
        event
        for event in record.events
        if id(event) in counted or (event["event"] in RETURNS and place(event) == fit)
    ]
    axes = row_axes(events, starts[-1].get("steps_per_epoch") if starts else None)
    return {
        "curves": [_drawn(curve, axes) for curve in run_curves(rows)],
        "marks": [
            {"kind": mark.kind, "text": mark.text, **_position(mark.step, axes)}
            for mark in marks
            if mark.fit == fit and isinstance(mark.step, int)
        ],
    }


def _position(step: int, axes: RowAxes) -> dict[str, Any]:
    epochs, seconds = axes.at(step) or (None, None)
    return {"step": step, "epoch": _short(epochs), "time": _short(seconds)}


def _drawn(curve: Curve, axes: RowAxes) -> dict[str, Any]:
    drawn = {"metric": curve.metric, "validation": curve.validation, "rows": curve.rows}
    drawn |= _columns(curve.points, axes)
    if curve.means is not None:
        drawn["means"] = _columns(curve.means, axes)
    return drawn


def _columns(points: Sequence[Point], axes: RowAxes) -> dict[str, list[Any]]:
    return {
        "step": [axes.steps[number] for number, _ in points],
        "epoch": [_short(axes.epochs[number]) for number, _ in points],
        "time": [_short(axes.seconds[number]) for number, _ in points],
        "value": [_short(value) for _, value in points],
    }


def _short(value: float | None) -> float | None:
    """A value with as many digits as a picture can show."""
    return None if value is None else float(f"{value:.7g}")


# -- shares of time


def time_shares(record: RunRecord) -> list[tuple[Epoch, Shares]]:
    """Seconds by rank and by what they were spent on, by epoch.

    Ranks are named by their numbers at the last start: after a loss the others have new ones.
    """
    found = []
    names: list[str] = []
    for event in record.outer:
        if event["event"] == "start":
            names = [f"rank {rank}" for rank in range(_count(event))]
        elif event["event"] == "ranks":
            names = _names_after(names, event)
        elif event["event"] == "times":
            names += [f"rank {rank}" for rank in range(len(names), len(event["ranks"]))]
            rows = zip(names, event["ranks"], strict=False)
            ranks = {name: _of_rank(row, names) for name, row in rows}
            found.append(((place(event)[0], event["epoch"]), ranks))
    return [(epoch, ranks) for epoch, ranks in found if any(ranks.values())]


def _names_after(names: Sequence[str], event: Event) -> list[str]:
    """The names of the present ranks after ranks were lost, or have joined: the others keep their
    order, and those that join come last."""
    lost, count, step = event.get("lost"), _count(event), event["step"]
    gone = {rank for rank in lost if is_number(rank)} if isinstance(lost, list) else set()
    kept = [name for rank, name in enumerate(names) if rank not in gone]
    if count < len(kept):  # of changes in quick succession the last one is recorded
        return [f"rank {rank}, after step {step}" for rank in range(count)]
    new = range(len(kept), count)
    return [*kept, *(f"rank {rank}, joined after step {step}" for rank in new)]


def _count(event: Event) -> int:
    """The number of ranks that an event names; 0 for what is none."""
    count = event.get("ranks")
    return count if isinstance(count, int) and 0 < count < 10**6 else 0


def _of_rank(rank: Any, names: Sequence[str]) -> dict[str, float]:
    """The shares of a rank's time, which sum up to all of it."""
    if not isinstance(rank, dict):
        return {}
    shares = {_share(str(k), names): float(v) for k, v in rank.items() if is_number(v) and v >= 0}
    wall = shares.pop(_WALL, None)
    left = 0.0 if wall is None else wall - sum(shares.values())
    return shares | ({_LEFT: left} if wall and left > 1e-3 * wall else {})


def _share(share: str, names: Sequence[str]) -> str:
    """The name of a share, with that of the rank that was waited for."""
    number = share.removeprefix(WAITING)
    if number == share or not number.isdecimal() or int(number) >= len(names):
        return share
    return f"{WAITING.removesuffix('rank ')}{names[int(number)]}"


def total_shares(epochs: Iterable[tuple[Epoch, Shares]]) -> Shares:
    """The shares of all epochs, added up by rank."""
    total: Shares = {}
    for _, ranks in epochs:
        for rank, shares in ranks.items():
            sums = total.setdefault(rank, {})
            for name, seconds in shares.items():
                sums[name] = sums.get(name, 0.0) + seconds
    return total


def _epoch_groups(epochs: Iterable[Epoch]) -> list[list[Epoch]]:
    """The epochs of all runs in groups, each of which is a row."""
    epochs = sorted(set(epochs))
    every = -(-len(epochs) // MOST_TIMES) or 1
    return [epochs[k : k + every] for k in range(0, len(epochs), every)]


def _drawn_times(
    epochs: Sequence[tuple[Epoch, Shares]], groups: Sequence[Sequence[Epoch]]
) -> list[dict[str, Any]]:
    """All epochs together, then each, or several together where there are many. The rows of all
    runs are of the same epochs; of those that a run does not have, there are no ranks."""
    if not epochs:
        return []
    rows = [("all epochs", total_shares(epochs))]
    several = len({fit for group in groups for fit, _ in group}) > 1
    by_epoch: dict[Epoch, list[tuple[Epoch, Shares]]] = {}  # one may have been trained again
    for each in epochs:
        by_epoch.setdefault(each[0], []).append(each)
    for group in groups if sum(map(len, groups)) > 1 else ():
        label = _epoch_label(group[0], several)
        if len(group) > 1:
            label += f" to {_epoch_label(group[-1], several).removeprefix('epoch ')}"
        own = (each for epoch in group for each in by_epoch.get(epoch, ()))
        rows.append((label, total_shares(own)))
    return [
        {
            "label": label,
            "names": list(ranks)[:MOST_RANKS],
            "ranks": [_rounded(rank) for rank in list(ranks.values())[:MOST_RANKS]],
        }
        for label, ranks in rows
    ]


def _epoch_label(epoch: Epoch, several_fits: bool) -> str:
    return f"fit {epoch[0]}, epoch {epoch[1]}" if several_fits else f"epoch {epoch[1]}"


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{seconds:.4g}") for name, seconds in shares.items()}


def is_thinned(data: Event) -> bool:
    """Whether any curve of a page's data has fewer points than rows."""
    fits = [fit for run in data["runs"] for fit in run["fits"].values()]
    return any("means" in curve for fit in fits for curve in fit["curves"])
