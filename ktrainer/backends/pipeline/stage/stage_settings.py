"""Settings that stages are compiled with; the arguments and the scope of their computation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import keras

from ktrainer.backends.pipeline.graph.untraceable import location_of
from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.errors import ModelError

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


class StageScope(keras.StatelessScope):
    """A scope that notes what is assigned to other variables than those that it has values of."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dropped: list[tuple[Any, str | None]] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        if id(update[0]) not in self.state_mapping:
            self._dropped.append((update[0], location_of(sys._getframe())))
        super().add_update(update)

    def refuse_dropped(self, model: Any) -> None:
        """Refuse what was assigned to variables that nothing keeps, but for those of metrics: of
        predictions none count, and Keras updates those of a loss that `model.metrics` may not list.

        Raises:
            ModelError: naming one.
        """
        metrics = [m for layer in model._flatten_layers(include_self=True) for m in layer._metrics]
        metrics += [model._loss_tracker, model._compile_metrics, model._compile_loss]
        known = {id(v) for each in metrics for v in getattr(each, "variables", ())}
        known |= {id(v) for v in model.metrics_variables}
        dropped = [(v, where) for v, where in self._dropped if id(v) not in known]
        if not dropped:
            return
        variable, where = dropped[0]
        raise ModelError(
            f"code of a layer, loss or metric assigns {variable.path!r}"
            f"{f' ({where})' if where else ''}, but a pipeline keeps only what is assigned to "
            "variables that Keras finds there. Make this variable, or the "
            "keras.random.SeedGenerator that has it, an attribute of the layer, metric or "
            "keras.losses.Loss itself, not of an object inside. If it belongs to another layer, "
            "put both on one stage, with backend.stages or `with ktrainer.partition(i):`"
        )


def take(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """`values` cut into lists of the given lengths; the rest is dropped."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(values[start : start + count]))
        start += count
    return parts
