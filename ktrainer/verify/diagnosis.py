"""Diagnose why a split update differs from the unsplit one, and name the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerances:
    """How far numbers that two computations share may differ by rounding, relative to the larger.

    A loss that cannot be split differs by a factor or so, far above all of these.

    Attributes:
        check, check_floor: `health.verify`, which warns people who have not asked for it and is
            therefore the most generous: a gradient's error, and what part of the largest gradient
            it must be besides.
        logs, weights, floor: `ktrainer verify`: logs and gradients, which it shows anyway; what
            updates make of weights, as an optimizer such as Adam can amplify rounding (100 times
            as far as is measured in float32, and a factor of two is an error of a half); and the
            part of the largest gradient that is no more than rounding.
    """

    check: float
    check_floor: float
    logs: float
    weights: float
    floor: float


TOLERANCES = {
    "float64": Tolerances(check=1e-7, check_floor=1e-8, logs=1e-8, weights=1e-6, floor=1e-10),
    "float32": Tolerances(check=1e-2, check_floor=1e-3, logs=2e-3, weights=2e-2, floor=1e-4),
    "half": Tolerances(check=0.15, check_floor=0.05, logs=0.1, weights=0.4, floor=0.03),
}
_SAME_FACTOR = 0.05  # factors that differ by less are one ...
_EXPLAINED = 0.2  # ... unless this part of the difference remains


def common_factor(pairs: Iterable[tuple[Any, Any]], within: float, floor: float) -> float | None:
    """The c with a = c * b for all pairs of gradients; None: there is none but 1.

    Args:
        pairs: a variable's gradient at once, and in parts.
        within: how far from 1 a factor may be by rounding.
        floor: the part of the largest gradient that is no more than rounding.
    """
    flat = [(np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)) for a, b in pairs]
    largest = max((_norm(a) for a, _ in flat), default=0.0)
    factors = []
    for a, b in flat:
        if max(_norm(a), _norm(b)) <= floor * largest:
            continue
        square = float(b @ b)
        factor = float(a @ b) / square if square else float("nan")
        if not _norm(a - factor * b) <= min(_SAME_FACTOR * _norm(a), _EXPLAINED * _norm(a - b)):
            return None
        factors.append(factor)
    if not factors:
        return None
    factor, spread = float(np.median(factors)), max(factors) - min(factors)
    one = spread <= min(_SAME_FACTOR * abs(factor), _EXPLAINED * abs(factor - 1))
    return factor if one and abs(factor - 1) > within else None


def cause(factor: float | None, parts: int) -> str:
    """Why gradients in parts differ from those at once, as far as can be told, and what to do.

    Args:
        factor: the one by which all of them differ.
        parts: how many there are.
    """
    if factor is None:
        return (
            "The loss couples examples (pairs within the batch, statistics of the batch, gradients "
            "changed by hand), or a part of it is a sum over examples. Set "
            "trainer.loss_scope=global; in a train_step of your own use ktrainer.all_gather, means "
            "instead of sums, and BatchNormalization(synchronized=True)."
        )
    if abs(factor / parts - 1) < _SAME_FACTOR:
        text = (
            f"All gradients are smaller by the number of parts ({factor:.3g}): the loss is a sum "
            "over examples, where a mean is expected."
        )
    else:
        text = (
            f"All gradients differ by one factor ({factor:.3g}, with {parts} parts): the loss is "
            "divided or multiplied by something that is counted in the batch."
        )
    return (
        f"{text} Take the mean; where compute_loss or a compiled loss computes it, one number an "
        "example or trainer.loss_scope=global will do, too."
    )


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))
