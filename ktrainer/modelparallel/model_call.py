"""The call of a cut model in a step's body, which stops there until the stages have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.partition.stage_graphs import is_differentiable
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
    def stages(*weights: Any) -> Any:
        def gradient(*of_outputs: Any) -> Any:
            return body.ask(Backward(list(of_outputs)))

        return [tf.identity(x) for x in smooth], gradient

    # On a stage without weights the loss still has a gradient to ask for.
    weights = [tf.convert_to_tensor(v.value) for v in held]
    linked = iter(stages(*weights) if smooth and weights else smooth)
    return keras.tree.pack_sequence_as(
        outputs, [next(linked) if is_differentiable(x) else x for x in flat]
    )
