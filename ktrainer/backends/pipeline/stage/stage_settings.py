"""Settings that stages are compiled with, and the arguments of their computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import keras

from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators

Mode = Literal["train", "test", "predict"]


@dataclass(frozen=True)
class StageSettings:
    """Settings of all stages of a process.

    Attributes:
        model: the whole model.
        regularised: for each stage, the variables whose regularisation loss it counts.
        sums: where gradients are added up.
        replica: which copy of the model this is; other copies draw other random numbers.
        recompute: save a stage's inputs only, and run forward again before its backward pass.
        xla: compile with XLA.
        may_weigh_losses: a microbatch's weight may be in its loss, which is for nothing, and not
            put to each gradient, where all gradients are linear. In 16 bits a small factor could
            lose, or hide, what a loss scale looks for.
        global_loss: the last stage sends its outputs to a `GlobalLoss`, which computes the loss.
        split: a batch has several microbatches, in this replica or others.
    """

    model: keras.Model
    regularised: Mapping[int, Sequence[Any]]
    sums: GradientAccumulators
    replica: int = 0
    recompute: bool = False
    xla: bool = False
    may_weigh_losses: bool = False
    global_loss: bool = False
    split: bool = False


@dataclass(frozen=True)
class Arguments:
    """Everything that a stage's computation depends on, as flat lists of tensors or specs.

    Attributes:
        trainable, state: values of the variables.
        received: from the stage before; the last one is the sum of the losses that layers of
            earlier stages have added, a scalar.
        data: leaves of the microbatch that the stage needs.
        scalars: float64: the microbatch's weight, and what its loss is multiplied by before it is
            differentiated: the loss scale, with the weight if losses are weighted.
        denominators: float64 vector; on the last stage.
    """

    trainable: list[Any]
    state: list[Any]
    received: list[Any]
    data: list[Any]
    scalars: list[Any]
    denominators: list[Any]

    def flat(self) -> list[Any]:
        """All of them, in order."""
        return [value for item in fields(self) for value in getattr(self, item.name)]

    def like(self, values: Sequence[Any]) -> Arguments:
        """`values`, flat, sorted as these are."""
        parts = [getattr(self, item.name) for item in fields(self)]
        return Arguments(*take(values, [len(part) for part in parts]))


def take(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """`values` cut into lists of the given lengths; the rest is dropped."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(values[start : start + count]))
        start += count
    return parts
