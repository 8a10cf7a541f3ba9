"""Floating-point operations of a TensorFlow graph with static shapes, counted by simple formulas.

| op | operations |
|---|---|
| matrix products | 2 x the elements of the result x the length that is summed over |
| `Einsum` | 2 x the product of the lengths of all its labels |
| convolutions | 2 x the elements of the result x the elements of the kernel a result sums over |
| loops | the body's, times the iterations, where their number is known |
| functions | the function's |
| anything else | 1 for each element of its floating-point results |

A multiplication and an addition are two operations, as in `tf.profiler`, which knows fewer ops.
Reading, reshaping and copying count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

_FREE = frozenset(
    (
        *("Cast", "Concat", "ConcatV2", "Const", "ExpandDims", "Gather", "GatherNd", "GatherV2"),
        *("Identity", "IdentityN", "NoOp", "Pack", "Placeholder", "Range", "ReadVariableOp"),
        *("Reshape", "ResourceGather", "Shape", "Slice", "Split", "SplitV", "Squeeze"),
        *("StopGradient", "StridedSlice", "Transpose", "Unpack"),
    )
)


def count_flops(graph: tf.Graph) -> int:
    """Operations of what a function's graph computes, those of the functions it calls included."""
    needed: dict[str, tf.Operation] = {}
    waiting = [output.op for output in graph.outputs]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed[op.name] = op
            waiting += [x.op for x in op.inputs]
    return sum(_flops(op) for op in needed.values())


def _flops(op: tf.Operation) -> int:
    kind = op.type
    if kind in _FREE or kind.startswith("TensorList"):
        return 0
    if kind in _FORMULAS:
        return _FORMULAS[kind](op)
    if kind in ("While", "StatelessWhile"):
        return _iterations(op) * _called(op, "body")
    if kind in ("If", "StatelessIf"):
        return max(_called(op, "then_branch"), _called(op, "else_branch"))
    if kind in ("PartitionedCall", "StatefulPartitionedCall"):
        return _called(op, "f")
    return sum(_elements(x) for x in op.outputs if x.dtype.is_floating)


def _matmul(op: tf.Operation) -> int:
    left, transposed = op.inputs[0], "transpose_a" if op.type == "MatMul" else "adj_x"
    summed = left.shape[-2] if op.get_attr(transposed) else left.shape[-1]
    return 2 * _elements(op.outputs[0]) * (summed or 1)


def _einsum(op: tf.Operation) -> int:
    operands = op.get_attr("equation").decode().partition("->")[0].split(",")
    lengths: dict[str, int] = {}
    for labels, tensor in zip(operands, op.inputs, strict=True):
        before, _, after = labels.partition("...")
        dims = list(tensor.shape)
        named = [*zip(before, dims, strict=False)]
        named += [*zip(reversed(after), reversed(dims), strict=False)]
        hidden = dims[len(before) : len(dims) - len(after)]
        named += [(f"...{i}", d) for i, d in enumerate(reversed(hidden))]
        for label, length in named:
            lengths[label] = max(lengths.get(label, 1), length or 1)
    return 2 * math.prod(lengths.values())


def _convolution(op: tf.Operation) -> int:
    *window, channels, _ = op.inputs[1].shape
    # One filter for each channel: a result sums over the window alone.
    summed = window if op.type.startswith("Depthwise") else (*window, channels)
    return 2 * _elements(op.outputs[0]) * math.prod(d or 1 for d in summed)


def _transposed_convolution(op: tf.Operation) -> int:
    *window, channels, _ = op.inputs[1].shape  # (window, results, operands)
    return 2 * _elements(op.inputs[2]) * math.prod(d or 1 for d in (*window, channels))


_FORMULAS: dict[str, Callable[[tf.Operation], int]] = {
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Conv2D": _convolution,
    "Conv2DBackpropInput": _transposed_convolution,
    "Conv3D": _convolution,
    "Conv3DBackpropInputV2": _transposed_convolution,
    "DepthwiseConv2dNative": _convolution,
    "Einsum": _einsum,
    "MatMul": _matmul,
}


def _called(op: tf.Operation, attribute: str) -> int:
    name = op.get_attr(attribute).name
    return count_flops(op.graph._get_function(name).graph)


def _iterations(op: tf.Operation) -> int:
    """The maximum given to `tf.while_loop`, as Keras' RNNs do; else 1."""
    # TensorFlow's loops carry a counter and the maximum before the variables of the loop.
    maximum = _scalar(op.inputs[1]) if len(op.inputs) > 1 else None
    return max(1, maximum) if maximum is not None else 1


def _scalar(tensor: tf.Tensor) -> int | None:
    value = tf.get_static_value(tensor)
    if value is not None:
        return int(value) if value.ndim == 0 else None
    # Keras gives RNNs the greatest of the sequence lengths, which is one number here.
    return _scalar(tensor.op.inputs[0]) if tensor.op.type in ("Identity", "Max") else None


def _elements(tensor: tf.Tensor) -> int:
    if tensor.shape.rank is None:
        return 0
    return math.prod(d or 1 for d in tensor.shape)
