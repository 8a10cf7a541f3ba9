"""Two runs: the first step at which their values differ, and what else differs.

Values are compared where both runs have recorded them: rows of `logging.every` and of validation at
the same step, rows of epochs at the same epoch. A row holds the means of its epoch so far, so a
difference shows in the first row after it arose. Speed and memory (`watch`) are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import MEASURED, Event, place

_UNLIKE = ("run.dir", "checkpoint.dir", "checkpoint.resume")  # the places of a run, not its course
_FACTS = ("ranks", "replicas", "devices", "script", "code", "versions", "settings", "model", "data")
_MISSING = "(none)"

Key = tuple[tuple[int, int], str, int]  # the call of fit, the kind of row, its step or epoch


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
        fit: the script's call of `fit`; `1, inside 2` for one of a callback's.
        event: log, validation or epoch.
        step, epoch: of the row in the first run.
        metric: its name.
        values: in both runs.
        absolute, relative: their distance; the latter of the larger magnitude.
    """

    fit: str
    event: str
    step: int
    epoch: int
    metric: str
    values: tuple[float, float]
    absolute: float
    relative: float


@dataclass
class RunDifferences:
    """Differences between two runs.

    Attributes:
        points: rows of which a value was compared.
        first: by metric, the first difference, the earliest on top.
        largest: by metric, the largest relative one.
        equal_until: the step of the last row before the first difference in which all is equal.
        only: metrics that one run alone has, by run.
        alone: numbers of rows that one run alone has, by run.
        facts: dotted name -> its text in both runs, where that differs.
        changed: by run, what a resume has changed: step, name, before, after.
        steps: the first epoch at whose end the numbers of updates differ, and both numbers.
    """

    points: int = 0
    first: dict[str, Difference] = field(default_factory=dict)
    largest: dict[str, Difference] = field(default_factory=dict)
    equal_until: int | None = None
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    alone: tuple[int, int] = (0, 0)
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    steps: tuple[int, int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as a JSON-able dict."""
        return asdict(self)


def compare(a: RunRecord, b: RunRecord, tolerance: float = 0.0) -> RunDifferences:
    """Compare two runs.

    Args:
        tolerance: the relative difference that does not count; 0: values are equal to the bit.
    """
    found = RunDifferences()
    rows = _by_key(a.rows), _by_key(b.rows)
    common = [key for key in rows[0] if key in rows[1]]
    found.alone = len(rows[0]) - len(common), len(rows[1]) - len(common)
    for key in common:
        pair = rows[0][key], rows[1][key]
        if pair[0]["step"] != pair[1]["step"] and found.steps is None:
            found.steps = pair[0]["epoch"], pair[0]["step"], pair[1]["step"]
        if not _compare_rows(found, pair, tolerance):
            continue
        found.points += 1
        if not found.first:
            found.equal_until = pair[0]["step"]
    names = [{name for row in each.values() for name in row["metrics"]} for each in rows]
    found.only = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    found.facts = _differing_facts(recorded_facts(a), recorded_facts(b))
    found.changed = changes_on_resume(a), changes_on_resume(b)
    return found


def _by_key(rows: Iterable[Event]) -> dict[Key, Event]:
    """Rows by what the same row of another run has too."""
    return {
        (place(row), row["event"], row["epoch" if row["event"] == "epoch" else "step"]): row
        for row in rows
    }


def _compare_rows(found: RunDifferences, pair: tuple[Event, Event], tolerance: float) -> bool:
    """Compare two rows; return whether they have values of the same metric."""
    one, other = pair
    common = [n for n in one["metrics"] if n in other["metrics"] and not n.startswith(MEASURED)]
    for name in common:
        values = float(one["metrics"][name]), float(other["metrics"][name])
        absolute, relative = _distance(*values)
        if relative <= tolerance:
            continue
        new = Difference(
            _fit_name(one),
            one["event"],
            one["step"],
            one["epoch"],
            name,
            values,
            absolute,
            relative,
        )
        found.first.setdefault(name, new)
        known = found.largest.get(name)
        if known is None or relative > known.relative:
            found.largest[name] = new
    return bool(common)


def _distance(a: float, b: float) -> tuple[float, float]:
    """The absolute and the relative distance; both infinite where only one is a finite number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0, 0.0
    distance = abs(a - b)
    if not math.isfinite(distance):
        return math.inf, math.inf
    return distance, distance / max(abs(a), abs(b))


def _fit_name(event: Event) -> str:
    fit, inside = place(event)
    return f"{fit}, inside {inside}" if inside else str(fit)


# -- settings, versions, data


def recorded_facts(run: RunRecord) -> dict[str, str]:
    """The facts of a run at its last beginning, by dotted name."""
    beginnings = [start for start in run.starts if not start["step"]] or run.starts
    if not beginnings:
        return {}
    of_first_fit = [start for start in beginnings if place(start) == place(beginnings[0])]
    facts = _of_start(of_first_fit[-1])
    for event in run.events:
        if event["event"] == "data" and place(event) == place(of_first_fit[-1]):
            facts |= _flat("data", event["data"])
    return facts


def _of_start(start: Event) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name in _FACTS:
        if name in start:
            flat |= _flat(name, start[name])
    return flat


def _flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= _flat(f"{name}.{key}", inner)
        return flat
    return {name: str(value)}


def facts_of_all(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The facts that differ between any of several runs and the first: name -> texts, by run."""
    facts = [recorded_facts(run) for run in runs]
    names = [name for other in facts[1:] for name in _differing_facts(facts[0], other)]
    return {name: [of.get(name, _MISSING) for of in facts] for name in dict.fromkeys(names)}


def _differing_facts(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    kinds = [{name.partition(".")[0] for name in each} for each in (a, b)]
    both = kinds[0] & kinds[1]  # one that began at another's checkpoint did not record its model
    found = {}
    for name in dict.fromkeys([*a, *b]):
        kind = name.partition(".")[0]
        if kind not in both or name.removeprefix("settings.") in _UNLIKE:
            continue
        # Ranks compare more of some data than one process does.
        if kind == "data" and not (name in a and name in b):
            continue
        if a.get(name) != b.get(name):
            found[name] = a.get(name, _MISSING), b.get(name, _MISSING)
    return found


def changes_on_resume(run: RunRecord) -> list[dict[str, Any]]:
    """Differences from the start before, wherever a run was resumed."""
    found = []
    for before, after in zip(run.starts, run.starts[1:], strict=False):
        if place(before) != place(after) or not after["step"]:
            continue
        old, new = _of_start(before), _of_start(after)
        for name in new:
            known = name in old and not name.startswith("model.")
            if known and old[name] != new[name] and name.removeprefix("settings.") not in _UNLIKE:
                found.append(
                    {"step": after["step"], "name": name, "before": old[name], "after": new[name]}
                )
    return found
