"""Tensors that a model's code computes from its variables alone, outside of any layer's call.

`ops.matmul(h, ops.transpose(self.embed.embeddings))` ties an output projection to an embedding.
When a model is traced, `transpose` sees no symbolic tensor: it would be computed there and then,
and its value of that moment be a constant of the graph, cut off from training. Here such tensors
become nodes that compute them from the variables' current values, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.errors import ModelError


class Derived:
    """A tensor computed from variables; called without arguments.

    Args:
        function: compiled; its arguments are the variables' values.
        variables: the variables that it depends on.
    """

    name = "derived"

    def __init__(self, function: Any, variables: tuple[Any, ...]) -> None:
        self.function = function
        self.variables = variables

    def __call__(self) -> tf.Tensor:
        # Uncast values: the function was traced inside of the casts of the surrounding layer.
        with keras.src.backend.AutocastScope(None):
            return self.function(*[tf.convert_to_tensor(v.value) for v in self.variables])


def has_value(argument: Any) -> bool:
    """Return whether an argument of a recorded call is a tensor that is not symbolic."""
    return tf.is_tensor(argument) and not isinstance(
        argument, (keras.KerasTensor, keras.Variable, tf.Variable)
    )


def find_derived(model: Any, find: Callable[[], list[tf.Tensor]]) -> list[Derived | tf.Tensor]:
    """Classify the tensors with a value among a model's recorded arguments.

    Args:
        find: records the model's calls again, and gives these tensors, always in the same order.

    Returns:
        For each, a `Derived` where it depends on variables, and else its constant value.

    Raises:
        ModelError: one of them is random, or depends on a variable that the model does not track.
    """
    variables = list({id(v): v for v in model.variables}.values())
    function, sources = _compile(find, variables, variables)
    tensors = [output.op.inputs[0] for output in function.graph.outputs]
    constants: list[tf.Tensor] = []
    found: list[Derived | tf.Tensor] = []
    for position, tensor in enumerate(tensors):
        used = _sources_of(model, tensor, [source.name for source in sources])
        mine = [v for v, source in zip(variables, sources, strict=True) if source.name in used]
        if mine:
            found.append(Derived(_compile(find, variables, mine, position)[0], tuple(mine)))
            continue
        # Those that depend on no variable are right without the variables' values.
        constants = constants or _compile(find, variables, [])[0]()
        found.append(constants[position])
    return found


def _compile(
    find: Callable[[], list[tf.Tensor]],
    variables: Sequence[Any],
    arguments: Sequence[Any],
    position: int | None = None,
) -> tuple[Any, list[tf.Tensor]]:
    """A function of some variables' values that gives all tensors, or one; and its arguments.

    It references none of the variables: their values are arguments, and those of all others, which
    it does not need, are zeros that are never computed.
    """
    ids = {id(v) for v in arguments}

    def compute(*values: tf.Tensor) -> Any:
        rest = [v for v in variables if id(v) not in ids]
        mapping = [*zip(arguments, values, strict=True)]
        mapping += [(v, tf.zeros(v.shape, v.dtype)) for v in rest]
        with keras.StatelessScope(state_mapping=mapping):
            tensors = find()
        # The identity keeps tensors apart that are one and the same, or arguments as they are.
        tensors = [tf.identity(t) for t in tensors]
        return tensors if position is None else tensors[position]

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in arguments]
    concrete = tf.function(compute, autograph=False).get_concrete_function(*specs)
    # The graph also lists variables that Keras read while it inferred shapes; TensorFlow refuses to
    # call it once one of them is deleted.
    concrete.graph.variables = ()
    return concrete, list(concrete.inputs[: len(specs)])


def _sources_of(model: Any, tensor: tf.Tensor, arguments: list[str]) -> set[str]:
    """Names of those of a function's arguments that a tensor depends on."""
    used: set[str] = set()
    seen: set[str] = set()
    waiting = [tensor]
    while waiting:
        current = waiting.pop()
        operation = current.op
        if "Random" in operation.type:
            raise _not_a_constant(model, "random numbers drawn outside of any layer")
        if operation.type == "Placeholder" and current.name not in arguments:
            if current.dtype == tf.resource:
                raise _not_a_constant(model, "a variable that the model does not track")
            continue
        if current.name in arguments:
            used.add(current.name)
        elif operation.name not in seen:
            seen.add(operation.name)
            waiting.extend(operation.inputs)
    return used


def _not_a_constant(model: Any, what: str) -> ModelError:
    return ModelError(
        f"the `call` of {type(model).__name__} {model.name!r} uses {what}, which a pipeline would "
        "freeze to its first value. Move that code into a `keras.layers.Layer`, as an attribute of "
        "the model: a layer is kept in one piece and may do anything"
    )
