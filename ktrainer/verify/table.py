"""What `ktrainer verify` prints: two recorded runs, item by item, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_SHOWN = 30
# By precision: (logs and gradients, weights, share of the largest gradient that is no more than
# rounding). Optimizers such as Adam make steps of the same size of tiny gradients.
_TOLERANCES = {
    "float64": (1e-8, 1e-6, 1e-10),
    "float32": (2e-3, 2e-2, 1e-4),
    "half": (0.1, 0.2, 0.03),
}
_ORDER = ("loss", "metric", "gradient", "weight")
_SAME_FACTOR = 0.02

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One item over all updates.

    Attributes:
        kind: loss, metric, gradient or weight.
        name: of the metric or variable.
        difference: the largest relative one.
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
        return not self.missing and not any(row.differs for row in self.rows)

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
    """All that the ranks of one run have recorded."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob(f"{role}-*.npz")):
        with np.load(path, allow_pickle=False) as recorded:
            for name in recorded.files:
                arrays.setdefault(name, recorded[name])
    return arrays


def compare(whole: Arrays, split: Arrays, parts: int | None = None) -> Comparison:
    """Compare two runs.

    Args:
        whole: recorded in one process.
        split: recorded as configured.
        parts: ranks, replicas or microbatches, where that is known.
    """
    precision = str(whole.get("precision", "float32"))
    close, closer_weights, rounding = _TOLERANCES[precision]
    items = {key for key in whole if key.count("/") >= 2}
    others = {key for key in split if key.count("/") >= 2}
    if not any("/gradient/" in key for key in others):  # parameter servers
        items = {key for key in items if "/gradient/" not in key}
    largest = _largest_gradients(whole)
    silent = _without_gradient(whole, rounding, largest)
    found: dict[tuple[str, str], Row] = {}
    for key in sorted(items & others):
        update, kind, name = int(key[:4]), *key[5:].split("/", 1)
        within = closer_weights if kind == "weight" else close
        least = rounding * largest.get(update, 0.0) / within if kind == "gradient" else 0.0
        difference = _difference(whole[key], split[key], least)
        differs = not difference <= within and not (kind == "weight" and name in silent)
        row = Row(kind, name.partition(":")[2] or name, difference, update, differs)
        before = found.get((kind, name))
        if before is None or (row.differs, row.difference) > (before.differs, before.difference):
            found[kind, name] = row
    rows = sorted(found.values(), key=_rank)
    missing = sorted(name.split("/", 2)[2].partition(":")[2] for name in items ^ others)
    result = Comparison(rows, missing, max((int(key[:4]) for key in items & others), default=0))
    if not result.equal:
        result.cause = _cause(whole, split, result, parts, close)
    return result


def _rank(row: Row) -> tuple[bool, float, int, str]:
    """The worst of what differs first, as far as it is shown; then the rest, logs on top."""
    worst = -float(f"{row.difference:.1e}") if row.differs else 0.0
    return not row.differs, worst, _ORDER.index(row.kind), row.name


def _difference(a: np.ndarray, b: np.ndarray, least: float) -> float:
    """In norm, relative to the larger of the two, and to `least` if both are smaller."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)), least)
    error = float(np.linalg.norm(a - b))
    return error / scale if np.isfinite(error) else float("inf")


def _largest_gradients(whole: Arrays) -> dict[int, float]:
    largest: dict[int, float] = {}
    for key, value in whole.items():
        if "/gradient/" in key:
            norm = float(np.linalg.norm(value.astype(np.float64)))
            largest[int(key[:4])] = max(largest.get(int(key[:4]), 0.0), norm)
    return largest


def _without_gradient(whole: Arrays, rounding: float, largest: Mapping[int, float]) -> set[str]:
    """Variables whose gradients are no more than rounding: what an optimizer makes of them means
    nothing."""
    paths: dict[str, bool] = {}
    for key, value in whole.items():
        if "/gradient/" in key:
            path = key[5:].split("/", 1)[1].partition(":")[2]
            tiny = float(np.linalg.norm(value)) <= rounding * largest[int(key[:4])]
            paths[path] = paths.get(path, True) and tiny
    names = {key[5:].split("/", 1)[1] for key in whole if "/weight/" in key}
    return {name for name in names if paths.get(name.partition(":")[2], False)}


def _cause(
    whole: Arrays, split: Arrays, result: Comparison, parts: int | None, close: float
) -> str:
    factor = _common_factor(whole, split)
    if factor is not None and abs(factor - 1) > max(close, _SAME_FACTOR):
        counted = parts is not None and abs(factor / parts - 1) < _SAME_FACTOR
        number = f", the number of parts ({parts})" if counted else ""
        return (
            f"All gradients of the first update are smaller by one factor, {factor:.4g}{number}: "
            "the loss is a sum over examples, where a mean is expected. Return the mean, or one "
            "number an example, or set trainer.loss_scope=global."
        )
    if result.missing:
        return (
            "The runs have different variables or logs: the script or its train_step does "
            "something else with several processes."
        )
    first = [row for row in result.rows if row.differs and row.update == 1]
    kinds = {row.kind for row in first} or {row.kind for row in result.rows if row.differs}
    if bool(split.get("statistics", False)):
        return (
            "BatchNormalization uses the statistics of its part of a batch: make it with "
            "synchronized=True, or accept the difference."
        )
    if kinds <= {"metric"}:
        return (
            "Loss and gradients agree, and metrics do not: a metric's result is not what its "
            "states add up to over parts of a batch."
        )
    if kinds <= {"weight"}:
        return (
            "Gradients agree, and weights do not: the step assigns weights itself (a side effect), "
            "or the optimizer depends on what it has not been given."
        )
    if not first:
        return (
            "The first update agrees, a later one does not: a state that the step changes (a side "
            "effect in Python, a variable of its own), other data, or random numbers from outside "
            "of Keras and tf.random."
        )
    text = (
        "The loss couples examples (pairs within the batch, statistics of the batch), or a part "
        "of it is a sum over examples: set trainer.loss_scope=global; in a train_step of your own "
        "use ktrainer.all_gather, and means instead of sums."
    )
    return text + (
        " Or the runs differ in their data or random numbers: seed what the script draws from "
        "NumPy or Python."
    )


def _common_factor(whole: Arrays, split: Arrays) -> float | None:
    """The c with whole = c * split for all gradients of the first update."""
    pairs = [
        (value.astype(np.float64).ravel(), split[key].astype(np.float64).ravel())
        for key, value in whole.items()
        if key.startswith("0001/gradient/") and key in split
    ]
    factors: list[float] = []
    total = sum(float(a @ a) for a, _ in pairs if np.isfinite(a).all())
    for a, b in pairs:
        if float(a @ a) <= 1e-8 * total:
            continue
        square = float(b @ b)
        factor = float(a @ b) / square if square else float("nan")
        if not np.linalg.norm(a - factor * b) <= _SAME_FACTOR * np.linalg.norm(a):
            return None
        factors.append(factor)
    return _one(factors)


def _one(factors: Sequence[float]) -> float | None:
    if not factors or max(factors) - min(factors) > _SAME_FACTOR * max(map(abs, factors)):
        return None
    return float(np.median(factors))
