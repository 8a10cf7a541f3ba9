"""Trace a Keras model into its graph of layers and ops.

Calling a model on symbolic tensors records every call of a layer or op inside. Models nested in
it, and layers of the user's that are made of other layers, are opened: they are called in the
same way, so that a cut between stages may fall inside them. What does not work on symbolic
tensors stays closed, one node that may do anything; only the model itself must be open.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from ktrainer.backends.pipeline.graph.build_graph import assemble, values_of
from ktrainer.backends.pipeline.graph.call_recorder import Call, CallRecorder, training_kwargs
from ktrainer.backends.pipeline.graph.derived_tensors import find_derived
from ktrainer.backends.pipeline.graph.nodes import Graph, Node, Ref, Tensor, run_nodes
from ktrainer.backends.pipeline.graph.untraceable import refuse_compiled_call, untraceable
from ktrainer.errors import KtrainerError, ModelError

_PLACEHOLDER_LENGTH = 8  # works for most models


def trace(
    model: Any, inputs_spec: Any = None, *, training: bool = True, like: Graph | None = None
) -> Graph:
    """The graph of layers and ops of a model, sharing its variables.

    Takes Sequential, functional and nested models, and subclassed ones whose `call` consists of
    calls of layers and of `keras.ops`. The model is built if it is not, and else unchanged.

    Args:
        inputs_spec: a batch of the model's inputs, or anything of that structure whose leaves
            have `shape` (with the batch dimension) and `dtype`; not needed where a model knows
            its inputs.
        training: the mode: layers and Python code may behave differently in training. A model
            has one graph for each mode; a node has the same name in both.
        like: the graph of the other mode; layers that are closed there are closed here.

    Raises:
        ModelError: the model cannot be traced; names the line of its code that fails, or the layer
            whose `call` is a `tf.function`.
    """
    inputs = _symbolic_inputs(model, inputs_spec)
    refuse_compiled_call(model)
    _build(model, inputs, training)
    for layer in model._flatten_layers():
        if layer.variables:  # others compute the same
            refuse_compiled_call(layer)
    closed = {id(n.operation): n.closed for n in (like.nodes if like else ()) if n.closed}
    while True:
        try:
            recorder = CallRecorder(model, closed)
            outputs = recorder.record(inputs, training)
            if recorder.mixes:
                continue
        except KtrainerError:
            raise
        except Exception as error:
            raise untraceable(model, error) from error
        derived = _derived(model, inputs, training, closed, recorder.calls)
        graph, owners = assemble(model, inputs, outputs, recorder.calls, derived, training)
        try:
            return _dry_run(graph)
        except _NodeFailed as failed:
            # An inner layer that fails only when it runs, say on an unknown dimension: keep it
            # closed. Each round closes one more layer.
            owner = owners[failed.node.name]
            if owner is model:
                raise untraceable(model, failed.error, failed.node.where) from failed.error
            closed[id(owner)] = f"it cannot be run op by op: {failed.error}"


def trace_open(
    model: Any, inputs_spec: Any, *, training: bool = True, like: Graph | None = None
) -> Graph:
    """Trace a model, as `trace`, for inputs that may have any length.

    Where the model's code must know one that the spec leaves open, as for positions counted in
    `call`, it is 8 in the graph, and the model is traced again for each length in the data.
    """
    try:
        return trace(model, inputs_spec, training=training, like=like)
    except ModelError:
        if not any(map(_is_open, keras.tree.flatten(inputs_spec))):
            raise
        known = keras.tree.map_structure(_closed, inputs_spec)
        with suppress(ModelError):  # then the length is not the problem
            return trace(model, known, training=training, like=like)
        raise


def _is_open(leaf: Any) -> bool:
    return isinstance(leaf, tf.TensorSpec) and None in tuple(leaf.shape)[1:]


def _closed(leaf: Any) -> Any:
    if not _is_open(leaf):
        return leaf
    lengths = [_PLACEHOLDER_LENGTH if size is None else size for size in leaf.shape[1:]]
    return tf.TensorSpec((leaf.shape[0], *lengths), leaf.dtype)


class _NodeFailed(Exception):
    def __init__(self, node: Node, error: Exception) -> None:
        self.node, self.error = node, error


def _symbolic_inputs(model: Any, spec: Any) -> Any:
    if spec is None:
        known = getattr(model, "_functional", None) or model
        spec = getattr(known, "_inputs_struct", None)
    if spec is None:
        raise ModelError(
            f"{type(model).__name__} {model.name!r} does not say what its inputs are; give their "
            "shapes and types, for example `inputs_spec=keras.InputSpec((None, 28, 28, 1), "
            "dtype='float32')`, or a batch of data"
        )
    paths = keras.tree.flatten_with_path(spec)
    count = len(paths)
    leaves = [
        _symbolic_input(leaf, "_".join(str(part) for part in path) or "input", count)
        for path, leaf in paths
    ]
    return keras.tree.pack_sequence_as(spec, leaves)


def _symbolic_input(leaf: Any, name: str, count: int) -> Any:
    if isinstance(leaf, (tf.RaggedTensor, tf.RaggedTensorSpec)):
        raise ModelError(
            "ragged inputs cannot be cut into micro-batches of a pipeline; pad them, for example "
            "with `.to_tensor()`"
        )
    if isinstance(leaf, keras.KerasTensor):
        name = leaf.name
    elif count > 1 and name.isdigit():
        name = f"input_{name}"
    sparse = getattr(leaf, "sparse", isinstance(leaf, (tf.SparseTensor, tf.SparseTensorSpec)))
    return keras.KerasTensor(
        (None, *tuple(leaf.shape)[1:]),
        dtype=backend.standardize_dtype(leaf.dtype or "float32"),
        sparse=bool(sparse),
        name=name,
    )


def _build(model: Any, inputs: Any, training: bool) -> None:
    """Build the model as Keras does in the first call; errors of its code are raised."""
    if all(layer.built for layer in model._flatten_layers()):
        return
    kwargs = {"training": training} if model._call_has_training_arg else {}
    try:
        with warnings.catch_warnings():
            # Keras, or this module, raises an error afterwards for what Keras warns about here.
            warnings.simplefilter("ignore")
            if not isinstance(model, keras.Sequential):
                with model._open_name_scope():
                    backend.compute_output_spec(model.call, inputs, **kwargs)
            model(inputs, **training_kwargs(model, training))
    except Exception as error:
        raise untraceable(model, error) from error


def _derived(
    model: Any, inputs: Any, training: bool, closed: Mapping[int, str], calls: list[Call]
) -> list[Any]:
    """Classify the tensors with a value among the calls' arguments, in order."""
    if not any(values_of(call) for call in calls):
        return []

    def find() -> list[tf.Tensor]:
        recorder = CallRecorder(model, dict(closed))
        recorder.record(inputs, training)
        return [value for call in recorder.calls for value in values_of(call)]

    return find_derived(model, find)


def _dry_run(graph: Graph) -> Graph:
    """Run the graph node by node on symbolic tensors of TensorFlow.

    That gives the exact shapes, types and masks: some layers remove a mask from their inputs, or
    set one on their outputs, only when they run.

    Raises:
        _NodeFailed: a node cannot be run.
    """
    known: dict[int, tuple[Any, Any]] = {}
    seen: list[Mapping[int, int]] = []

    def compute(*inputs: Any) -> Any:
        tensors = dict(zip(graph.inputs, inputs, strict=True))
        for node in graph.nodes:
            seen.append(_present(node.masks, tensors))
            try:
                run_nodes([replace(node, masks={})], tensors)
            except Exception as error:
                raise _NodeFailed(node, error) from error
        known.update({i: (x.shape, x.dtype) for i, x in tensors.items()})
        seen.append(_present(graph.masks, tensors))
        return [tensors[i] for i in graph.outputs]

    _quietly(compute, [graph.tensors[i] for i in graph.inputs])
    nodes = []
    for node, masks in zip(graph.nodes, seen, strict=False):
        gone = {graph_id for of, graph_id in node.masks.items() if of not in masks}
        inputs = tuple(i for i in node.inputs if i not in gone or _refers(node, i))
        nodes.append(replace(node, masks=masks, inputs=inputs))
    tensors = [
        replace(t, shape=tuple(known[t.id][0]), dtype=backend.standardize_dtype(known[t.id][1]))
        for t in graph.tensors
    ]
    return replace(graph, nodes=tuple(nodes), tensors=tuple(tensors), masks=seen[-1])


def _quietly(compute: Callable[..., Any], inputs: list[Tensor]) -> None:
    symbolic = [keras.KerasTensor(t.shape, t.dtype, sparse=t.sparse) for t in inputs]
    with warnings.catch_warnings():
        # Layers warn about masks again that they have warned about in the trace.
        warnings.simplefilter("ignore")
        backend.compute_output_spec(compute, *symbolic)


def _present(masks: Mapping[int, int], tensors: Mapping[int, Any]) -> dict[int, int]:
    present = (of for of in masks if backend.get_keras_mask(tensors[of]) is not None)
    return {of: masks[of] for of in present}


def _refers(node: Node, tensor: int) -> bool:
    return Ref(tensor) in keras.tree.flatten((tuple(node.args), dict(node.kwargs)))
