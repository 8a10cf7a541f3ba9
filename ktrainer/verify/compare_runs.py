"""The report of `ktrainer verify`: two recorded runs, item by item, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ktrainer.verify.diagnosis import TOLERANCES, Tolerances, cause, common_factor

_SHOWN = 30
_ULPS = 4.0  # of a weight's size: what rounding may make of updates that hardly move it
_ORDER = ("loss", "metric", "gradient", "weight")
# By what they are taken over; see `update_recorder`.
_STATISTICS = {
    "replica": "BatchNormalization uses the statistics of its part of a batch: make it with "
    "synchronized=True, or accept the difference.",
    "microbatch": "BatchNormalization normalises each microbatch or accumulated batch by itself, "
    "which synchronized=True does not change: accept the difference, or verify the rest with "
    "backend.microbatches=1 and trainer.accumulate=1.",
}

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One item over all updates.

    Attributes:
        kind: loss, metric, gradient or weight.
        name: of the metric or variable.
        difference: a relative one: at the first update at which it is more than rounding, or else
            the largest. Of a weight, it is that of its changes since the runs began.
        update: where that is.
        differs: whether that is more than rounding.
    """

    kind: str
    name: str
    difference: float
    update: int
    differs: bool


@dataclass
class Comparison:
    """Two runs side by side.

    Attributes:
        rows: the worst first.
        missing: items that one of the runs alone has.
        updates: how many were compared.
        cause: why they differ, as far as can be told, and what to do.
    """

    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    updates: int = 0
    cause: str = ""

    @property
    def equal(self) -> bool:
        return bool(self.rows) and not self.missing and not any(row.differs for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing was recorded by both runs"
        width = max(len(row.name) for row in self.rows[:_SHOWN])
        lines = [f"{'':8}  {'':{width}}  difference  update  verdict"]
        lines += [_line(row, width) for row in self.rows[:_SHOWN]]
        rest = self.rows[_SHOWN:]
        if rest:
            wrong = sum(row.differs for row in rest)
            lines.append(f"and {len(rest)} more, of which {wrong} differ")
        if self.missing:
            lines.append("only in one of the runs: " + ", ".join(self.missing[:5]))
        return "\n".join(lines)


def _line(row: Row, width: int) -> str:
    verdict = "differs" if row.differs else "equal to rounding"
    return f"{row.kind:8}  {row.name:{width}}  {row.difference:10.1e}  {row.update:6}  {verdict}"


def load(folder: Path, role: str) -> dict[str, np.ndarray]:
    """All that the ranks of one run have recorded.

    Args:
        role: `unsplit` or `split`; `initial` gives the weights that both began with.
    """
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob(f"{role}*.npz")):
        with np.load(path, allow_pickle=False) as recorded:
            for name in recorded.files:
                arrays.setdefault(name, recorded[name])
    return arrays


def compare(unsplit: Arrays, split: Arrays, initial: Arrays) -> Comparison:
    """Compare two runs.

    Args:
        unsplit: recorded in one process.
        split: recorded as configured.
        initial: the weights that both began with, and their rounding errors.
    """
    close = TOLERANCES[str(unsplit.get("precision", "float32"))]
    items = {key for key in unsplit if key.count("/") >= 2}
    others = {key for key in split if key.count("/") >= 2}
    if not any("/gradient/" in key for key in others):  # parameter servers
        items = {key for key in items if "/gradient/" not in key}
    largest = _largest_gradients(unsplit)
    silent = _without_gradient(unsplit, close.floor, largest)
    found: dict[tuple[str, str], Row] = {}
    for key in sorted(items & others):
        update, kind, name = int(key[:4]), *key[5:].split("/", 1)
        if kind == "weight":
            difference, within = _of_weight(name, unsplit[key], split[key], initial, close)
        else:
            least = close.floor * largest.get(update, 0.0) / close.logs if kind == "gradient" else 0
            difference, within = _difference(unsplit[key], split[key], least), close.logs
        differs = not difference <= within and not (kind == "weight" and name in silent)
        row = Row(kind, name.partition(":")[2] or name, difference, update, differs)
        before = found.get((kind, name))
        if before is None or (not before.differs and (differs or difference > before.difference)):
            found[kind, name] = row
    rows = sorted(found.values(), key=_rank)
    missing = sorted(name.split("/", 2)[2].partition(":")[2] for name in items ^ others)
    result = Comparison(rows, missing, max((int(key[:4]) for key in items & others), default=0))
    if not result.equal:
        result.cause = _cause(unsplit, split, result, close)
    return result


def _rank(row: Row) -> tuple[bool, float, int, str]:
    """Rows that differ first, the worst on top and as many as are shown; then the rest."""
    worst = -float(f"{row.difference:.1e}") if row.differs else 0.0
    return not row.differs, worst, _ORDER.index(row.kind), row.name


def _of_weight(
    name: str, a: np.ndarray, b: np.ndarray, initial: Arrays, close: Tolerances
) -> tuple[float, float]:
    """The difference between what the updates of two runs made of a weight, and how much of it may
    be rounding: nothing of integers."""
    if a.dtype.kind != "f":
        return _difference(a, b), 0.0
    begin = initial[name].astype(np.float64)
    least = _ULPS * float(initial[f"ulp/{name}"]) * _norm(begin) / close.weights
    return _difference(a - begin, b - begin, least), close.weights


def _difference(a: np.ndarray, b: np.ndarray, least: float = 0.0) -> float:
    """In norm, relative to the larger of the two, and to `least` if both are smaller."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    error = _norm(a - b)
    return error / max(_norm(a), _norm(b), least) if np.isfinite(error) else float("inf")


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def _largest_gradients(unsplit: Arrays) -> dict[int, float]:
    largest: dict[int, float] = {}
    for key, value in unsplit.items():
        if "/gradient/" in key:
            largest[int(key[:4])] = max(largest.get(int(key[:4]), 0.0), _norm(value))
    return largest


def _without_gradient(unsplit: Arrays, rounding: float, largest: Mapping[int, float]) -> set[str]:
    """Variables whose gradients are no more than rounding: what an optimizer makes of them means
    nothing."""
    paths: dict[str, bool] = {}
    for key, value in unsplit.items():
        if "/gradient/" in key:
            path = key[5:].split("/", 1)[1].partition(":")[2]
            tiny = _norm(value) <= rounding * largest[int(key[:4])]
            paths[path] = paths.get(path, True) and tiny
    names = {key[5:].split("/", 1)[1] for key in unsplit if "/weight/" in key}
    return {name for name in names if paths.get(name.partition(":")[2], False)}


def _cause(unsplit: Arrays, split: Arrays, result: Comparison, close: Tolerances) -> str:
    parts = int(split.get("parts", 1))
    factor = _common_factor(unsplit, split, close)
    if factor is not None:
        return cause(factor, parts)
    if result.missing:
        return (
            "The runs have different variables or logs: the script or its train_step does "
            "something else with several processes."
        )
    first = [row for row in result.rows if row.differs and row.update == 1]
    kinds = {row.kind for row in first} or {row.kind for row in result.rows if row.differs}
    statistics = str(split.get("statistics", ""))
    if statistics:
        return _STATISTICS[statistics]
    if kinds <= {"metric"}:
        return (
            "Loss and gradients agree, and metrics do not: a metric's result is not what its "
            "states add up to over parts of a batch."
        )
    if kinds <= {"weight"}:
        return (
            "Gradients agree, and weights do not: the step assigns weights itself (a side effect), "
            "or a setting of the optimizer, such as its learning rate, depends on the number of "
            "processes."
        )
    if not first:
        return (
            "The first update agrees, a later one does not: a state that the step changes (a side "
            "effect in Python, a variable of its own), other data, or random numbers from outside "
            "of Keras and tf.random."
        )
    return cause(None, parts) + (
        " Or the runs differ in their data or random numbers: seed what the script draws from "
        "NumPy or Python."
    )


def _common_factor(unsplit: Arrays, split: Arrays, close: Tolerances) -> float | None:
    """The c with unsplit = c * split for all gradients of the first update."""
    first = [key for key in unsplit if key.startswith("0001/gradient/") and key in split]
    pairs = [(unsplit[key], split[key]) for key in first]
    if any(a.shape != b.shape for a, b in pairs):
        return None
    return common_factor(pairs, close.logs, close.floor)
