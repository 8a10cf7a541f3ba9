"""The call of a cut model in a step's body, which stops there until the stages have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.model_call import is_watched, linked_outputs
from ktrainer.modelparallel.coroutines import Coroutine

RUNNER = "_ktrainer_stage_runner"  # attribute of a model that was cut: its `StageRunner`


@dataclass
class Forward:
    """A body asks for the outputs of a model.

    Attributes:
        watched: a tape of the body watches the inputs.
    """

    model: Any
    inputs: Any
    training: bool
    watched: bool


@dataclass
class Backward:
    """A body asks for the gradients of the variables that are held here, and of the inputs.

    Attributes:
        of_call: what `Forward` was answered with.
    """

    of_call: Any
    of_outputs: list[Any]
    of_added: Any


def run_through_stages(body: Coroutine, model: Any, inputs: Any, training: bool) -> Any:
    """Call a model inside of a body: stop there, and give its outputs their gradient."""
    inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
    flat = keras.tree.flatten(inputs)
    watched = is_watched(flat)
    made, call = body.ask(Forward(model, inputs, training, watched))
    runner = vars(model)[RUNNER]

    def backward(of_outputs: list[Any], of_added: Any) -> Any:
        return body.ask(Backward(call, of_outputs, of_added))

    given = flat if watched else []
    graph = runner.planned.graph(training)
    outputs, body.losses[id(model)] = linked_outputs(runner, graph, made, given, backward)
    return outputs
