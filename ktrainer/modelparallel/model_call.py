"""The call of a cut model in a step's body, which stops there until the stages have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.partition.stage_graphs import is_differentiable
from ktrainer.errors import ModelError
from ktrainer.modelparallel.coroutines import Coroutine

RUNNER = "_ktrainer_stage_runner"  # attribute of a model that was cut: its `StageRunner`


@dataclass
class Forward:
    """A body asks for the outputs of its model."""

    model: Any
    inputs: Any
    training: bool


@dataclass
class Backward:
    """A body asks for the gradients of the variables that are held here."""

    of_outputs: list[Any]


def run_through_stages(body: Coroutine, model: Any, inputs: Any, training: bool) -> Any:
    """Call a model inside of a body: stop there, and give its outputs their gradient."""
    inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
    outputs = body.ask(Forward(model, inputs, training))
    flat = keras.tree.flatten(outputs)
    smooth = [x for x in flat if is_differentiable(x)]
    held = vars(model)[RUNNER].held

    @tf.custom_gradient
    def stages(*sources: Any) -> Any:
        def gradient(*of_outputs: Any) -> Any:
            found = body.ask(Backward(list(of_outputs)))
            return [*found, *(tf.zeros_like(x) for x in sources[len(found) :])]

        return [tf.identity(x) for x in smooth], gradient

    weights = [tf.convert_to_tensor(v.value) for v in held]
    given = [_without_gradient(x) for x in keras.tree.flatten(inputs) if is_differentiable(x)]
    linked = iter(stages(*weights, *given) if smooth and weights else smooth)
    return keras.tree.pack_sequence_as(
        outputs, [next(linked) if is_differentiable(x) else x for x in flat]
    )


@tf.custom_gradient
def _without_gradient(value: tf.Tensor) -> Any:
    """`value`, whose gradient is refused: a tape asks for it only if something before the model is
    differentiated too."""

    def gradient(_: tf.Tensor) -> Any:
        raise ModelError(
            "a gradient with respect to the input of a DistributedModel was asked for, which the "
            "stages do not compute: something before the model is a trained variable, or is "
            "watched by the tape. Put it into the model, or take tf.stop_gradient of the input"
        )

    return tf.identity(value), gradient
