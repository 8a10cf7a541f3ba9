"""Gradients of examples at once beside those of the same examples in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.verify.passes import LeftOut, Pass

# (relative to a variable's gradient, relative to the largest gradient): a difference must be above
# both. Rounding stays far below; a loss that cannot be split is far above, by a factor or so.
_TOLERANCES = {"float64": (1e-7, 1e-8), "float32": (1e-2, 1e-3), "half": (0.15, 0.05)}
_SAME_FACTOR = 0.05  # factors of variables that differ by less are one


@dataclass(frozen=True)
class Difference:
    """How gradients in parts differ from those at once.

    Attributes:
        variable: the one whose gradient differs most.
        relative: by how much, in norm.
        whole_loss, split_loss: the losses; None where the model keeps none.
        factor: gradient at once = factor * gradient in parts, for all variables; None: there is no
            such factor.
        parts: how many parts there were.
        changed: Python attributes that the step changes.
    """

    variable: str
    relative: float
    whole_loss: float | None
    split_loss: float | None
    factor: float | None
    parts: int
    changed: tuple[str, ...] = ()


def precision_of(model: keras.Model) -> str:
    """The lowest precision of a model's layers: "half", "float32" or "float64"."""
    kinds = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    kinds |= {str(v.dtype) for v in model.trainable_variables}
    if kinds & {"float16", "bfloat16"}:
        return "half"
    return "float32" if "float32" in kinds else "float64"


def difference(whole: Pass, split: Pass, parts: int, model: keras.Model) -> Difference | None:
    """The difference; None if there is none but rounding.

    Raises:
        LeftOut: there is nothing to compare; says why.
    """
    pairs = list(_pairs(whole, split))
    norms = [max(_norm(a), _norm(b)) for _, a, b in pairs]
    if not pairs or not np.isfinite([_norm(a) for _, a, _ in pairs]).all():
        raise LeftOut("its gradients are not finite" if pairs else "it has no gradients")
    within, floor = _TOLERANCES[precision_of(model)]
    largest = max(norms)
    found: list[tuple[float, str, Any, Any]] = []
    for (name, a, b), norm in zip(pairs, norms, strict=True):
        error = _norm(a - b)
        if not np.isfinite(error) or error > max(within * norm, floor * largest):
            found.append((error / norm if np.isfinite(error) else np.inf, name, a, b))
    losses = (whole.loss, split.loss)
    if not found and not _losses_differ(*losses, within):
        return None
    if not found:
        relative = abs(losses[0] - losses[1]) / max(abs(losses[0]), abs(losses[1]))  # type: ignore
        return Difference("the loss", relative, *losses, None, parts, tuple(whole.changed))
    relative, name, _, _ = max(found, key=lambda each: each[0])
    factor = _common_factor([(a, b) for _, _, a, b in found], len(found) == len(pairs))
    return Difference(name, relative, *losses, factor, parts, tuple(whole.changed))


def _losses_differ(whole: float | None, split: float | None, within: float) -> bool:
    if whole is None or split is None or not np.isfinite(whole):
        return False
    return not abs(whole - split) <= within * max(abs(whole), abs(split), 1e-3)


def _pairs(whole: Pass, split: Pass) -> Iterator[tuple[str, Any, Any]]:
    ids = [[[id(v) for v in each] for each in one.variables] for one in (whole, split)]
    if ids[0] != ids[1]:
        raise LeftOut("train_step applies its optimizers differently to other examples")
    for variables, *gradients in zip(
        whole.variables, whole.gradients, split.gradients, strict=True
    ):
        for variable, a, b in zip(variables, *gradients, strict=True):
            if a is not None or b is not None:
                zeros = tf.zeros(variable.shape, (b if a is None else a).dtype)
                yield variable.path, zeros if a is None else a, zeros if b is None else b


def _common_factor(pairs: list[tuple[Any, Any]], every: bool) -> float | None:
    """The c with a = c * b for all pairs."""
    factors = []
    for a, b in pairs:
        a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
        square = float(tf.reduce_sum(b * b))
        factor = float(tf.reduce_sum(a * b)) / square if square else np.inf
        if not np.isfinite(factor) or _norm(a - factor * b) > _SAME_FACTOR * _norm(a):
            return None
        factors.append(factor)
    same = max(factors) - min(factors) <= _SAME_FACTOR * abs(max(factors, key=abs))
    return float(np.median(factors)) if same and every else None


def _norm(gradient: Any) -> float:
    return float(tf.norm(tf.cast(gradient, tf.float64)))


def explain(found: Difference, split: str, full_check: str) -> str:
    """What a warning says of a difference: what, why, what to do.

    Args:
        split: into what an update is split.
        full_check: how to run the full check.
    """
    losses = ""
    if found.whole_loss is not None and found.split_loss is not None:
        losses = f" (loss {found.whole_loss:.6g} at once, {found.split_loss:.6g} in parts)"
    by = "is not finite" if np.isinf(found.relative) else f"differs by {100 * found.relative:.3g} %"
    what = "" if found.variable == "the loss" else "the gradient of "
    return (
        f"the loss of this model is not what one process computes: {what}{found.variable} {by} "
        f"between a few examples at once and the same in {found.parts} parts{losses}; an update is "
        f"split into {split}. {_cause(found)} {full_check}"
    )


def _cause(found: Difference) -> str:
    if found.factor is not None and abs(found.factor / found.parts - 1) < _SAME_FACTOR:
        return (
            f"All gradients are smaller by the number of parts ({found.factor:.3g}): the loss is a "
            "sum over examples, where a mean is expected. Return the mean, or one number an "
            "example, or set trainer.loss_scope=global."
        )
    if found.factor is not None:
        return (
            f"All gradients differ by one factor ({found.factor:.3g}): the loss is divided by "
            "something that is counted in the batch. Return the mean, or one number an example, "
            "or set trainer.loss_scope=global."
        )
    text = (
        "The loss couples examples (pairs within the batch, statistics of the batch, gradients "
        "clipped by hand), or a part of it is a sum over examples. Set trainer.loss_scope=global; "
        "in a train_step of your own use ktrainer.all_gather, means instead of sums, and "
        "BatchNormalization(synchronized=True)."
    )
    if found.changed:
        text += (
            f" Or it is a side effect: the step changes {', '.join(found.changed[:3])} in Python, "
            "once for each part."
        )
    return text
