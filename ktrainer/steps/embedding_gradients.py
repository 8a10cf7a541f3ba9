"""Gradients of embedding tables: which slices the parts of an update have in common.

A lookup of n rows has a gradient of n slices. Keras' optimizers do not add up the slices of a row:
Adam and its like square each by itself. So an update in parts gives the numbers of one process only
if it applies the very slices that one process has:

    rows looked up for each example, such as tokens    concatenated: each part has its examples'
    rows looked up once a batch, such as positions     summed, slice by slice: each part has all

`reduce_gradients` does that over ranks, `update_in_parts` over the batches of one rank.

Which of the two a gradient is, is decided while the step is traced: it is of the second kind if its
indices are the constants 0, 1, 2 ... Where in doubt, as in steps that run eagerly, slices are
concatenated.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ktrainer.distributed.collectives import Gradient


class CommonSlices(tf.IndexedSlices):
    """Slices of the same rows, in the same order, in every part of an update."""


def mark_common(gradient: Gradient, rows: int | tf.Tensor | None) -> Gradient:
    """`gradient`, as `CommonSlices` where it is that of rows looked up once a batch.

    Args:
        gradient: a tensor, IndexedSlices or None, of the step that is being traced.
        rows: those of the batch, as in `StepContext`: where their number is static, a lookup that
            depends on it cannot be told from one that does not.
    """
    known = isinstance(gradient, CommonSlices) or not isinstance(gradient, tf.IndexedSlices)
    if known or isinstance(rows, int) or (count := common_rows(gradient)) is None:
        return gradient
    # TensorFlow does not know how many values a lookup in the pieces of a table has.
    values = tf.ensure_shape(gradient.values, [count, *gradient.values.shape[1:]])
    return CommonSlices(values, gradient.indices, gradient.dense_shape)


def common_rows(slices: tf.IndexedSlices) -> int | None:
    """The number of indices if they are 0, 1, 2 ... whatever the batch, as those of positions are.

    Other constants might differ from rank to rank, and variables from part to part.

    Args:
        slices: symbolic ones, traced with an unknown number of rows.
    """
    if not tf.is_symbolic_tensor(slices.indices) or slices.values.shape.rank is None:
        return None
    value = _constant_value(slices.indices)
    if value is None or len(value) < 2 or not np.array_equal(value, np.arange(len(value))):
        return None
    return len(value)


def _constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a tensor of one axis that is computed from constants alone; else None."""
    nodes = _constant_nodes(tensor)
    if nodes is None:
        return None

    def computed() -> tf.Tensor:
        return tf.graph_util.import_graph_def(nodes, return_elements=[tensor.name])[0]

    try:
        with tf.init_scope():
            return tf.compat.v1.wrap_function(computed, [])().numpy()
    except (ValueError, tf.errors.OpError):  # such as a call of a function of another graph
        return None


def _constant_nodes(tensor: tf.Tensor) -> tf.compat.v1.GraphDef | None:
    """The operations that a tensor is computed from; None if they are more than constants."""
    nodes, waiting, seen = tf.compat.v1.GraphDef(), [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        node = nodes.node.add()
        if _is_static_length(op):
            proto = tf.make_tensor_proto(_static_length(op), op.outputs[0].dtype)
            node.name, node.op = op.name, "Const"
            node.attr["dtype"].type = proto.dtype
            node.attr["value"].tensor.CopyFrom(proto)
            continue
        if op.type.startswith(("Placeholder", "Stateless")) or op._is_stateful:
            return None
        node.CopyFrom(op.node_def)
        node.device = ""
        del node.input[len(op.inputs) :]  # control inputs come last
        node.attr.pop("_class", None)
        waiting += [x.op for x in op.inputs]
    return nodes


def _is_static_length(op: tf.Operation) -> bool:
    """Return whether `op` takes from the shape of a tensor a dimension that is static, as in
    `tf.shape(x)[1]`."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape" or op.outputs[0].shape.rank:
        return False
    return _static_length(op) is not None


def _static_length(op: tf.Operation) -> int | None:
    axis = tf.get_static_value(op.inputs[1])
    shape = op.inputs[0].op.inputs[0].shape
    return None if axis is None or shape.rank is None else shape[int(axis[0])]
