"""Assemble a graph from recorded calls: drop unused ops, number tensors, name nodes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from ktrainer.backends.pipeline.graph.call_recorder import Call
from ktrainer.backends.pipeline.graph.derived_tensors import Derived, has_value
from ktrainer.backends.pipeline.graph.nodes import Graph, Node, Ref, Tensor
from ktrainer.errors import ModelError


def values_of(call: Call) -> list[tf.Tensor]:
    """The tensors with a value among a call's arguments."""
    arguments = call.node.arguments
    return [x for x in keras.tree.flatten((arguments.args, arguments.kwargs)) if has_value(x)]


def assemble(
    model: Any, inputs: Any, outputs: Any, calls: list[Call], derived: list[Any], training: bool
) -> tuple[Graph, dict[str, Any]]:
    """The graph of all layers and of the ops that they or the outputs depend on, and the opened
    layer that called each node, by the node's name."""
    flat_inputs, flat_outputs = keras.tree.flatten(inputs), keras.tree.flatten(outputs)
    values = iter(derived)
    replaced = [[next(values) for _ in values_of(call)] for call in calls]
    needed = _reachable(calls, flat_outputs)
    builder = _GraphBuilder(flat_inputs)
    for call, mine in zip(calls, replaced, strict=True):
        if needed[id(call)]:
            builder.add(call, mine)
    for output in flat_outputs:
        if id(output) not in builder.ids:
            raise ModelError(
                f"an output of {type(model).__name__} {model.name!r} does not depend on its "
                "inputs, so no stage of a pipeline can compute it; leave it out of the outputs"
            )
    read = {id(v) for node in builder.nodes for v in node.variables}
    graph = Graph(
        nodes=tuple(builder.nodes),
        tensors=tuple(builder.tensors),
        inputs=tuple(range(len(flat_inputs))),
        outputs=tuple(builder.ids[id(x)] for x in flat_outputs),
        input_structure=keras.tree.map_structure(lambda x: Ref(builder.ids[id(x)]), inputs),
        output_structure=keras.tree.map_structure(lambda x: Ref(builder.ids[id(x)]), outputs),
        masks={
            builder.ids[id(x)]: builder.ids[id(mask)]
            for x in flat_outputs
            if (mask := backend.get_keras_mask(x)) is not None and id(mask) in builder.ids
        },
        training=training,
        unused=tuple(v for v in model.variables if id(v) not in read),
    )
    return graph, builder.owners


def _reachable(calls: list[Call], outputs: list[Any]) -> dict[int, bool]:
    """Mark the calls of layers, and those that contribute to a layer, to the outputs or to their
    masks, by the call's `id()`. A layer whose output nothing reads may add a loss, or assign.
    """
    needed = {id(x) for x in outputs} | {id(backend.get_keras_mask(x)) for x in outputs}
    result = {}
    for call in reversed(calls):
        result[id(call)] = call.is_layer or any(id(x) in needed for x in call.node.outputs)
        if result[id(call)]:
            needed |= {id(x) for x in call.node.arguments.keras_tensors}
            needed |= {id(mask) for mask in call.masks_read.values()}
    return result


class _GraphBuilder:
    """Numbers tensors and names nodes, call by call."""

    def __init__(self, inputs: list[Any]) -> None:
        self.nodes: list[Node] = []
        self.tensors = [Tensor(i, x.name, x.shape, x.dtype, x.sparse) for i, x in enumerate(inputs)]
        self.ids = {id(x): i for i, x in enumerate(inputs)}
        self.owners: dict[str, Any] = {}
        self._taken: dict[str, int] = {}

    def add(self, call: Call, replaced: list[Any]) -> None:
        """Add a call, whose arguments with a value are replaced by constants or nodes."""
        if _changes_nothing(call):
            source = call.node.arguments.keras_tensors[0]
            self.ids[id(call.node.outputs[0])] = self.ids[id(source)]
            return
        values = iter([self._replacement(value, call) for value in replaced])

        def reference(argument: Any) -> Any:
            if isinstance(argument, keras.KerasTensor):
                return Ref(self.ids[id(argument)])
            return next(values) if has_value(argument) else argument

        arguments, operation = call.node.arguments, call.node.operation
        args, kwargs = keras.tree.map_structure(reference, (arguments.args, arguments.kwargs))
        masks = self._masks(call)
        flat = keras.tree.flatten((args, kwargs))
        references = [x.id for x in flat if isinstance(x, Ref)]
        trainable, non_trainable = _variables(operation, flat)
        kind = operation.name if call.named_by_user else _snake_case(type(operation).__name__)
        self._append(
            call,
            self._name(call, kind, ":" if call.named_by_user else "_"),
            call.node.outputs,
            operation=operation,
            inputs=tuple(dict.fromkeys((*references, *masks.values()))),
            trainable=trainable,
            non_trainable=non_trainable,
            args=args,
            kwargs=kwargs,
            masks=masks,
            carries_mask=call.carries_mask,
            context=call.context,
            autocast=call.autocast,
            closed=call.closed,
        )

    def _masks(self, call: Call) -> dict[int, int]:
        """Ids of tensors, and of their masks that the call reads."""
        read = call.masks_read.items()
        return {self.ids[of]: self.ids[id(mask)] for of, mask in read if id(mask) in self.ids}

    def _replacement(self, value: Any, call: Call) -> Any:
        if not isinstance(value, Derived):
            return value
        trainable, non_trainable = _variables(None, value.variables)
        output = value.function.structured_outputs
        made = self._append(
            call,
            self._name(call, Derived.name, "_"),
            [output],
            operation=value,
            inputs=(),
            trainable=trainable,
            non_trainable=non_trainable,
        )
        return Ref(made.outputs[0])

    def _append(self, call: Call, name: str, outputs: list[Any], **rest: Any) -> Node:
        first = len(self.tensors)
        for index, x in enumerate(outputs):
            self.ids.setdefault(id(x), first + index)
            label = f"{name}.{index}" if index else name
            dtype = backend.standardize_dtype(x.dtype)
            self.tensors.append(Tensor(first + index, label, tuple(x.shape), dtype))
        made = tuple(range(first, len(self.tensors)))
        node = Node(name=name, outputs=made, stage=call.stage, where=call.where, **rest)
        self.nodes.append(node)
        self.owners[name] = call.scope.layer
        return node

    def _name(self, call: Call, kind: str, separator: str) -> str:
        base = "/".join((*call.scope.path, kind))
        name, count = base, self._taken.get(base, 0)
        while name in self._taken:
            name, count = f"{base}{separator}{count}", count + 1
        self._taken[base], self._taken[name] = max(count, 1), 1
        return name


def _changes_nothing(call: Call) -> bool:
    """Return whether a call converts a tensor to a tensor, as functional models begin with."""
    if type(call.node.operation).__name__ != "ConvertToTensor":
        return False
    source, (output,) = call.node.arguments.keras_tensors[0], call.node.outputs
    return (source.dtype, source.sparse) == (output.dtype, output.sparse)


def _variables(operation: Any, arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Trainable and other variables of a layer, or among an op's arguments."""
    if isinstance(operation, keras.layers.Layer):
        return tuple(operation.trainable_variables), tuple(operation.non_trainable_variables)
    found = list({id(v): v for v in arguments if isinstance(v, keras.Variable)}.values())
    return tuple(v for v in found if v.trainable), tuple(v for v in found if not v.trainable)


def _snake_case(name: str) -> str:
    return keras.src.utils.naming.to_snake_case(name)
