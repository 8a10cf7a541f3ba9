"""The last stage's work on a model's outputs: loss, metrics, and the losses' denominators.

It does what Keras' own `train_step` and `test_step` do after the forward pass. Losses that
layers add on other stages (regularisation above all) arrive as one number, so that the loss in
the logs is the whole model's; each stage differentiates its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from ktrainer.backends.pipeline.graph.nodes import Graph, losses_collected, run_nodes
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph
from ktrainer.backends.pipeline.stage.microbatches import leaves
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps import optimizers_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.update_in_parts import count_denominators


def outputs_of(graph: Graph, tensors: Mapping[int, Any]) -> Any:
    """The model's outputs, structured as the model returns them, with their masks."""
    for output, mask in graph.masks.items():
        if output in tensors and backend.get_keras_mask(tensors[output]) is None:
            backend.set_keras_mask(tensors[output], tensors[mask])
    return keras.tree.map_structure(lambda ref: tensors[ref.id], graph.output_structure)


def loss_of(model: keras.Model, data: Any, y_pred: Any, added: list[Any], training: bool) -> Any:
    """The model's loss, with `added` for what its layers have added on all stages."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with _with_losses(model, added):
        return model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )


def count_loss(model: keras.Model, data: Any, loss: Any) -> None:
    """Count the loss of one microbatch."""
    model._loss_tracker.update_state(loss, sample_weight=tf.shape(leaves(data)[0])[0])


def metrics_of(model: keras.Model, data: Any, y_pred: Any) -> Any:
    """Count the metrics of one microbatch; returns the logs so far."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def loss_shapes_of_any_batch(
    model: keras.Model,
    stage: StageGraph,
    received: Sequence[Any],
    data: Any,
    training: bool,
) -> list[tf.TensorShape]:
    """The shapes of the losses that a stage's layers add and, on the last stage, of the model's
    loss, for a number of examples that is not known: what depends on it is None.

    Args:
        received: what the stage receives of earlier layers, with static shapes.
        data: nested specs of a microbatch.
    """
    graph = stage.graph
    any_number = tf.__internal__.FuncGraph("losses_of_any_number")
    with any_number.as_default(), losses_collected(stage.nodes) as scope:
        data = keras.tree.map_structure(lambda s: None if s is None else _open(s), data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        tensors = dict(zip(graph.inputs, leaves(x), strict=True))
        for i, value in zip(stage.receives, received, strict=True):
            varies = graph.tensors[i].shape[:1] == (None,)
            tensors[i] = _open(value) if varies else _placeholder(value)
        run_nodes(stage.nodes, tensors)
        losses = list(scope.losses)
        if stage.is_last:
            y_pred = outputs_of(graph, tensors)
            losses.append(loss_of(model, data, y_pred, _some_loss(model), training))
        return [loss.shape for loss in losses]


def _open(spec: Any) -> tf.Tensor:
    return _placeholder(tf.TensorSpec((None, *spec.shape[1:]), spec.dtype))


def _placeholder(spec: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


@contextmanager
def _with_losses(model: Any, added: list[Any]) -> Iterator[None]:
    """Let `model.losses` be `added`: each process has its own stage's losses only."""
    original = keras.layers.Layer.losses.fget

    def losses(layer: Any) -> list[Any]:
        return list(added) if layer is model else original(layer)

    with replaced((keras.layers.Layer, "losses", property(losses))):
        yield


def _some_loss(model: keras.Model) -> list[Any]:
    """Placeholders for the losses that layers add: Keras asks that there be some loss."""
    return [] if model._compile_loss is not None else [tf.zeros((), keras.config.floatx())]


def build_metrics(model: keras.Model, spec: Any, graph: Graph) -> None:
    """Make the states of a compiled model's losses and metrics, as Keras does at its first batch:
    every process has them, though the last stage alone counts.

    Args:
        spec: nested `tf.TensorSpec` of a local batch.
    """
    if not model.compiled:
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(_symbolic, spec)
    )
    outputs = [
        keras.KerasTensor(graph.tensors[i].shape, graph.tensors[i].dtype) for i in graph.outputs
    ]
    y_pred = keras.tree.pack_sequence_as(graph.output_structure, outputs)
    with _with_losses(model, _some_loss(model)):
        backend.compute_output_spec(
            model.compute_metrics, x, y, y_pred, sample_weight=sample_weight
        )
        backend.compute_output_spec(model._compute_loss, x, y, y_pred, sample_weight)


def _symbolic(spec: Any) -> Any:
    if spec is None:
        return None
    return keras.KerasTensor(spec.shape, backend.standardize_dtype(spec.dtype))


class Denominators:
    """Counts what the losses of a microbatch are divided by, before its forward pass.

    Masked and weighted losses are divided by a count over the whole batch, which must be known
    before the first backward pass. It depends on targets, weights and masks; what leads to the
    masks is computed here once more, from the inputs, and nothing else.

    Args:
        model: the whole model.
        stage: the last stage.
        data: nested `tf.TensorSpec` of a microbatch, static.
        training: which mode the graph is of.
        uniform: as in `StepContext`.

    Raises:
        ModelError: a mask depends on weights, which are on other stages.
    """

    def __init__(
        self,
        model: keras.Model,
        stage: StageGraph,
        data: Any,
        training: bool,
        uniform: bool,
    ) -> None:
        self.model, self.graph, self.training = model, stage.graph, training
        self._uniform = uniform
        self._outputs = _static_outputs(stage.graph, data)
        self._masks = [i for i in stage.graph.masks.values() if i not in stage.graph.inputs]
        self._nodes = _leading_to(stage.graph, self._masks)
        self._function = tf.function(self._record, autograph=False).get_concrete_function(data)
        self.count = int(self._function.outputs[0].shape[0])

    def __call__(self, data: Any) -> tf.Tensor:
        """The denominators of one microbatch, float64, in the order of the losses."""
        if not self.count:
            return tf.zeros([0], tf.float64)
        return self._function(*[tf.convert_to_tensor(x) for x in leaves(data)])

    def _record(self, data: Any) -> tf.Tensor:
        context = StepContext(
            tf.constant(1.0, tf.float64), uniform=self._uniform, denominators=[], record=True
        )
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        graph = self.graph
        tensors = dict(zip(graph.inputs, leaves(x), strict=True))
        with keras.StatelessScope(), keras_patches(context, optimizers_of(self.model)):
            run_nodes(self._nodes, tensors)
            for i in graph.outputs:
                # Only its shape and its mask count: the computation of the loss is cut away.
                tensors[i] = tf.zeros(self._outputs[i], graph.tensors[i].dtype)
            y_pred = outputs_of(graph, tensors)
            # Losses that layers add have no denominator.
            losses = _some_loss(self.model)
            return count_denominators(
                context, lambda: loss_of(self.model, data, y_pred, losses, self.training)
            )


def _static_outputs(graph: Graph, data: Any) -> dict[int, tuple[int, ...]]:
    """The shapes of the model's outputs for a microbatch of static shapes."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    rows = leaves(x)[0].shape[0]
    shapes = {i: (rows, *graph.tensors[i].shape[1:]) for i in graph.outputs}
    if any(None in shape for shape in shapes.values()):
        given = keras.tree.pack_sequence_as(
            graph.input_structure, [_symbolic(s) for s in leaves(x)]
        )
        made = keras.tree.flatten(backend.compute_output_spec(graph.compute, given))
        shapes = {i: tuple(spec.shape) for i, spec in zip(graph.outputs, made, strict=True)}
    return shapes


def _leading_to(graph: Graph, tensors: Sequence[int]) -> list[Any]:
    """The nodes that compute `tensors` from the model's inputs."""
    needed, found = set(tensors), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            needed.update(node.inputs)
            found.append(node)
            if node.trainable:
                raise ModelError(
                    f"the mask of an output depends on the weights of {node.name!r}, but a "
                    "pipeline must know masks before the forward pass; compute masks from the "
                    "model's inputs alone, or give sample weights instead"
                )
    return found[::-1]
