"""Compare gradients of a whole batch with those combined from its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.data.local_batch import take_slice
from ktrainer.verify.diagnosis import TOLERANCES, cause, common_factor
from ktrainer.verify.eager_pass import GradientPass, GradientPasses
from ktrainer.verify.side_effects import CheckSkipped

_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "half": 2.0**-10}  # of a number's size
_ONLY_ROUNDING = 0.01  # rounding errors of two sums differ by more, their own size being 1


@dataclass(frozen=True)
class Difference:
    """How gradients in parts differ from those at once.

    Attributes:
        variable: the one whose gradient differs most.
        relative: by how much, in norm.
        whole_loss, split_loss: the losses; None where the model keeps none.
        factor: gradient at once = factor * gradient in parts, for all variables; None: there is no
            such factor.
        parts: how many there were.
        examples: of how many in all.
        changed: Python attributes that the step changes.
    """

    variable: str
    relative: float
    whole_loss: float | None
    split_loss: float | None
    factor: float | None
    parts: int
    examples: int
    changed: tuple[str, ...] = ()


def precision_of(model: keras.Model) -> str:
    """The lowest precision of a model's layers: "half", "float32" or "float64"."""
    kinds = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    kinds |= {str(v.dtype) for v in model.trainable_variables}
    if kinds & {"float16", "bfloat16"}:
        return "half"
    return "float32" if "float32" in kinds else "float64"


def difference(
    whole: GradientPass, split: GradientPass, model: keras.Model, parts: int, examples: int
) -> Difference | None:
    """The difference; None if there is none but rounding.

    Raises:
        CheckSkipped: there is nothing to compare; says why.
    """
    pairs = list(_pairs(whole, split))
    norms = [max(_norm(a), _norm(b)) for _, a, b in pairs]
    if not pairs or not np.isfinite([_norm(a) for _, a, _ in pairs]).all():
        raise CheckSkipped("its gradients are not finite" if pairs else "it has no gradients")
    close = TOLERANCES[precision_of(model)]
    within, floor = close.check, close.check_floor
    largest = max(norms)
    found: list[tuple[float, str]] = []
    for (name, a, b), norm in zip(pairs, norms, strict=True):
        error = _norm(a - b)
        if not np.isfinite(error) or error > max(within * norm, floor * largest):
            found.append((error / norm if np.isfinite(error) else np.inf, name))
    losses = (whole.loss, split.loss)
    if not found and not _losses_differ(*losses, within):
        return None
    if not found:
        relative = abs(losses[0] - losses[1]) / max(abs(losses[0]), abs(losses[1]))  # type: ignore
        changed = tuple(whole.changed)
        return Difference("the loss", relative, *losses, None, parts, examples, changed)
    relative, name = max(found)
    factor = common_factor([(_array(a), _array(b)) for _, a, b in pairs], within, floor)
    return Difference(name, relative, *losses, factor, parts, examples, tuple(whole.changed))


def rounding_only(whole: GradientPass, split: GradientPass, model: keras.Model) -> list[str]:
    """The paths of variables whose gradients are no more than rounding errors of a sum that is
    zero, as for the bias of an attention's keys, and are scaled up by their optimizer.

    They differ in parts, and are smaller than one rounding error of the largest gradient: a sum
    that has a term of that size cannot tell them from zero. A sum of smaller terms could, so a
    variable that is listed may have a true gradient; one that is not may have none.
    """
    pairs = list(_pairs(whole, split))
    largest = max(max(_norm(a), _norm(b)) for _, a, b in pairs)
    precision = precision_of(model)
    smallest = _ROUNDING[precision] * largest
    within = max(_ONLY_ROUNDING, TOLERANCES[precision].check)
    return [
        name
        for name, a, b in pairs
        if name in whole.scaled
        and 0 < max(_norm(a), _norm(b)) <= smallest
        and _norm(a - b) > within * _norm(a)
    ]


def _losses_differ(whole: float | None, split: float | None, within: float) -> bool:
    if whole is None or split is None or not np.isfinite(whole):
        return False
    return not abs(whole - split) <= within * max(abs(whole), abs(split), 1e-3)


def _pairs(whole: GradientPass, split: GradientPass) -> Iterator[tuple[str, Any, Any]]:
    ids = [[[id(v) for v in each] for each in one.variables] for one in (whole, split)]
    if ids[0] != ids[1]:
        raise CheckSkipped("train_step applies its optimizers differently to other examples")
    for variables, *gradients in zip(
        whole.variables, whole.gradients, split.gradients, strict=True
    ):
        for variable, a, b in zip(variables, *gradients, strict=True):
            if a is not None or b is not None:
                zeros = tf.zeros(variable.shape, (b if a is None else a).dtype)
                yield variable.path, zeros if a is None else a, zeros if b is None else b


def _norm(gradient: Any) -> float:
    return float(np.linalg.norm(_array(gradient)))


def _array(gradient: Any) -> Any:
    return tf.cast(gradient, tf.float64).numpy()


def repeated_lookups(whole: GradientPass, split: GradientPass) -> list[str]:
    """The paths of variables whose rows are looked up once a batch, as those of a table of
    positions are, not once an example: parts look them up more often than the whole. Only those
    that an optimizer squares lookup by lookup."""
    return sorted(split.squared_slices - whole.squared_slices)


def call_couples_examples(passes: GradientPasses, batch: Any, rows: int, parts: int) -> bool:
    """Whether the model's outputs for an example depend on the others in its batch.

    False where that cannot be told: a model that is not called with its inputs alone, or whose
    outputs are random in each call.
    """
    slices = [take_slice(batch, rows, part, parts) for part in range(parts)]
    try:
        whole, again = passes.outputs(batch), passes.outputs(batch)
        split = [passes.outputs(each) for each in slices]
    except CheckSkipped:
        raise
    except Exception:
        return False
    close = TOLERANCES[precision_of(passes.model)]
    floor = close.check_floor * max((float(np.linalg.norm(a)) for a in whole), default=0.0)
    for a, same, *pieces in zip(whole, again, *split, strict=True):
        if a.ndim == 0 or len(a) != rows or any(b.shape[1:] != a.shape[1:] for b in pieces):
            continue  # not one output for each example
        rounding = max(close.check * float(np.linalg.norm(a)), floor)
        repeats = float(np.linalg.norm(a - same)) <= rounding
        if repeats and float(np.linalg.norm(a - np.concatenate(pieces))) > rounding:
            return True
    return False


def explain_lookup(path: str, split: str) -> str:
    """Text of a warning of such a variable; `split` is into what an update is split."""
    return (
        f"{path} will not train as in one process: its rows are looked up once a batch, not once "
        "an example, as those of a table of positions are, and the optimizer squares the gradient "
        f"of each lookup by itself; an update is split into {split}, each of which looks them up. "
        "Their gradients are added up first only where a compiled step shows that the indices do "
        "not depend on the batch, and never in a pipeline. Compile the step (run_eagerly=False), "
        "pad batches to one length, or look rows up for every example, with indices of shape "
        "(batch, length); or train with SGD."
    )


def explain(found: Difference, split: str, full_check: str) -> str:
    """Text of a warning of a difference: what, why, what to do.

    Args:
        split: into what an update is split.
        full_check: how to run the full check.
    """
    losses = ""
    if found.whole_loss is not None and found.split_loss is not None:
        losses = f" (loss {found.whole_loss:.6g} at once, {found.split_loss:.6g} in parts)"
    by = "is not finite" if np.isinf(found.relative) else f"differs by {100 * found.relative:.3g} %"
    what = "" if found.variable == "the loss" else "the gradient of "
    text = (
        f"this model does not train as in one process: {what}{found.variable} {by} between "
        f"{found.examples} examples computed at once and in {found.parts} parts{losses}. An update "
        f"is split into {split}. {cause(found.factor, found.parts)}"
    )
    if found.changed:
        text += (
            f" Or it is a side effect: the step changes {', '.join(found.changed[:3])} in Python, "
            "once for each part."
        )
    return f"{text} {full_check}"
