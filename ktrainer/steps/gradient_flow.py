"""Tensors of a traced step that are computed from its gradients, and by which operations.

A graph lists operations in the order in which they were made, inputs first, so one pass over it
is enough. Conditions and functions that are compiled by themselves are followed into; what leaves a
loop is not known, since that may be gradients of single examples. In an eager step the gradients
themselves are known, and nothing that is computed from them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ktrainer.steps.graph_parts import called_functions

LOCAL = "gradient of a local layer"  # stands among types of operations
# Operations that are linear in each input, in one of them, and in the first one.
_LINEAR = {
    *("Add", "AddN", "AddV2", "Sub", "Neg", "Sum", "Mean", "UnsortedSegmentSum", "Cast"),
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumericsV2"),
    *("CheckNumerics", "Reshape", "Squeeze", "ExpandDims", "Transpose", "ConcatV2", "Pack"),
    *("Unpack", "Split", "SplitV", "Slice", "StridedSlice", "GatherV2", "BroadcastTo"),
}
_PRODUCTS = {"Mul", "MulNoNan", "MatMul", "BatchMatMulV2", "Einsum"}
_QUOTIENTS = {"RealDiv", "DivNoNan"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Case"}


class GradientFlow:
    """What is known of the tensors of one step."""

    def __init__(self) -> None:
        self._changes: dict[Any, frozenset[str] | None] = {}  # by reference
        self._begun: set[Any] = set()  # gradients, whatever they are computed from
        self._followed: dict[Any, int] = {}  # operations of each graph

    def __bool__(self) -> bool:
        """Whether the step has taken gradients."""
        return bool(self._changes)

    def note(self, gradient: Any, local: bool) -> None:
        """Let the flow begin at a tensor."""
        self._begun.add(reference(gradient))
        self._changes[reference(gradient)] = frozenset([LOCAL] if local else [])

    def end(self, tensor: tf.Tensor) -> None:
        """Let the flow end at a tensor that is the same in all parts."""
        self._changes[tensor.ref()] = None

    def changes(self, value: Any) -> frozenset[str] | None:
        """The types of the operations, other than linear ones, between gradients and a value that
        is computed from them; else None."""
        key = reference(value)
        if not self or key is None:
            return None
        tensor = key.deref()
        if key not in self._changes and tf.is_symbolic_tensor(tensor):
            self._follow(tensor.graph)
        return self._changes.get(key)

    def _follow(self, graph: Any) -> None:
        operations = graph.get_operations()
        begun, self._followed[graph] = self._followed.get(graph, 0), len(operations)
        captures = {inner.ref(): outer for outer, inner in getattr(graph, "captures", ())}
        for operation in operations[begun:]:
            if operation.type in _CALLS:
                self._follow_into(operation)
            for output in operation.outputs:
                if operation.type == "Placeholder" and output.ref() in captures:
                    self._add(output, self.changes(captures[output.ref()]))
                else:
                    self._add(output, self._after(operation))

    def _follow_into(self, call: Any) -> None:
        for name in called_functions(call.node_def):
            graph = getattr(call.graph._get_function(name), "graph", None)  # None: imported
            for output, result in zip(call.outputs, graph.outputs if graph else (), strict=False):
                self._add(output, self.changes(result))

    def _add(self, tensor: Any, changes: frozenset[str] | None) -> None:
        key = tensor.ref()
        if key in self._begun or changes is None:
            return
        if self._changes.get(key, changes) is not None:  # None: the flow ends there
            self._changes[key] = changes | (self._changes.get(key) or frozenset())

    def _after(self, operation: Any) -> frozenset[str] | None:
        """The changes of an operation's outputs."""
        kind = operation.type
        found = [self._changes.get(each.ref()) for each in operation.inputs]
        if kind in _SHAPES or all(each is None for each in found):
            return None
        linear = (
            kind in _LINEAR
            or (kind in _PRODUCTS and None in found)
            or (kind in _QUOTIENTS and found[1] is None)
            or (kind in ("Select", "SelectV2") and found[0] is None)
        )
        return frozenset().union(*filter(None, found), [] if linear else [kind])


def reference(value: Any) -> Any:
    """The reference of a tensor, or of the values of slices; of anything else None."""
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    return tensor.ref() if isinstance(tensor, tf.Tensor) else None
