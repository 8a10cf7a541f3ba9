"""Forward and backward passes of one stage, compiled for microbatches of one shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.check_supported import (
    explain_assigned_weight,
    refuse_captured_weights,
)
from ktrainer.backends.pipeline.graph.nodes import run_nodes
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph, is_differentiable
from ktrainer.backends.pipeline.stage.loss_head import (
    count_loss,
    loss_of,
    loss_shapes_of_any_batch,
    metrics_of,
    outputs_of,
)
from ktrainer.backends.pipeline.stage.microbatches import Microbatch, leaves, with_leaves
from ktrainer.backends.pipeline.stage.stage_functions import Gradients, SavedTensors, StageFunctions
from ktrainer.backends.pipeline.stage.stage_settings import (
    Arguments,
    Mode,
    StageScope,
    StageSettings,
    take,
)
from ktrainer.backends.pipeline.stage.subgraphs import TracedGraph
from ktrainer.distributed.collectives import widened
from ktrainer.errors import ModelError
from ktrainer.steps import optimizers_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.random_numbers import count_seeds_from
from ktrainer.steps.step_context import StepContext


class CompiledStage:
    """The computations of one stage for one shape of microbatch.

    Args:
        stage: what it computes.
        mode: `train`, `test` or `predict`.
        settings: of this process.
        state: the variables that it may change: statistics, seeds, and on the last stage metrics.
        specs: of its arguments.
        data: nested specs of the whole microbatch.
        added_before: whether layers of earlier stages have added losses.
        custom_gradients_before: whether earlier stages have custom gradients.
        uniform: whether all data has the same shapes but for the first dimension.
        shared_seeds: `id()` of seeds that stages of several processes draw from.
    """

    def __init__(
        self,
        stage: StageGraph,
        mode: Mode,
        settings: StageSettings,
        state: Sequence[Any],
        specs: Arguments,
        data: Any,
        added_before: bool = False,
        custom_gradients_before: bool = False,
        uniform: bool = True,
        shared_seeds: Collection[int] = frozenset(),
    ) -> None:
        self._uniform, self._shared_seeds = uniform, shared_seeds
        self.stage, self.mode, self.settings = stage, mode, settings
        self.adds = added_before  # whether layers up to this stage have added losses
        self.state, self.specs, self._data = list(state), specs, data
        self._rows = leaves(data)[0].shape[0]
        self.logs: Any = None  # the structure of what the last stage returns
        self.changes: list[Any] = []  # those of the state that a forward pass changes
        self.weighs_losses = False  # whether its losses are weighted, and not its gradients
        self._gradients: Gradients | None = None
        self._of_weighted_loss: Gradients | None = None
        function = tf.compat.v1.wrap_function(self._trace, [specs.flat()])
        self._traced = TracedGraph(function.graph)
        if self._traced.assigned is not None:
            raise ModelError(
                f"code of a layer, loss or metric assigns {self._traced.assigned}, but a pipeline "
                "keeps only what is assigned to Keras' variables. Make it with "
                "`self.add_weight(trainable=False)` in a layer, or `self.add_variable` in a "
                "metric; a loss keeps it with trainer.loss_scope=global"
            )
        if mode == "train":
            read = self._traced.captured(settings.model.trainable_variables)
            refuse_captured_weights(read, stage.index)
        # Up to this stage; these need not be linear in the gradient of the loss.
        self.has_custom_gradients = custom_gradients_before or self._traced.has_custom_gradients
        self._arguments = list(function.inputs[: len(specs.flat())])

    def prune(self, used: Sequence[bool], weighs_losses: bool) -> list[bool]:
        """Choose the gradients, and prune those on which the loss does not depend.

        A variable that the loss does not depend on must have no gradient, as in one process: with
        zeros, weight decay would act on it.

        Args:
            used: for each of `gradient_specs`, whether the loss depends on it.
            weighs_losses: whether a microbatch's weight is in its loss, which saves putting it to
                each gradient; on all stages alike.

        Returns:
            The same for the differentiable tensors that it receives.
        """
        if self._gradients is None:
            return []
        self.weighs_losses = weighs_losses
        chosen = self._of_weighted_loss if weighs_losses else self._gradients
        assert chosen is not None
        self._gradients, received = chosen.pruned(self._traced, used)
        return received

    def compile(self) -> None:
        """Make the functions that run; after `prune`."""
        self._functions = StageFunctions(
            self._traced,
            self._arguments,
            len(self.specs.trainable),
            [*self._sent, *self._state, *self._results],
            self._gradients,
            self.settings.sums,
            self.settings.recompute and self.mode == "train",
            self.settings.xla,
        )

    @property
    def sends_outputs(self) -> bool:
        """True if its outputs are sent: to the next stage, or to the loss of the whole batch."""
        return not self.stage.is_last or (self.settings.global_loss and self.mode != "predict")

    @property
    def sends(self) -> list[tf.TensorSpec]:
        """Static specs of the tensors that it sends."""
        return [tf.TensorSpec(t.shape, t.dtype) for t in self._sent]

    @property
    def receives(self) -> list[tf.TensorSpec]:
        """Specs of the tensors that it receives from the stage before."""
        return self.specs.received

    @property
    def gradient_specs(self) -> list[tf.TensorSpec]:
        """Specs of the gradients that it receives from the stage after."""
        cotangents = self._gradients.cotangents if self._gradients is not None else []
        return [tf.TensorSpec(t.shape, t.dtype) for t in cotangents]

    @property
    def sparse(self) -> list[Any]:
        """The variables whose gradients are slices."""
        return self._gradients.sparse if self._gradients is not None else []

    @property
    def python_gradient(self) -> str | None:
        """Name of an op that needs the tape of the last forward pass, or None."""
        return self._functions.python_gradient

    def data_of(self, microbatch: Microbatch) -> list[Any]:
        """The leaves of a microbatch that this stage needs."""
        every = leaves(microbatch.data)
        chosen = every if self.stage.is_last else [every[k] for k in self.stage.inputs]
        return [tf.convert_to_tensor(x) for x in chosen]

    def forward(self, arguments: Arguments) -> tuple[list[Any], list[Any], list[Any], SavedTensors]:
        """Run forward.

        Returns:
            The tensors to send, new values of `changes`, results of the last stage, and saved
            tensors.
        """
        made, kept = self._functions.forward(arguments.flat())
        sent, state, results = take(made, (len(self._sent), len(self.changes), len(self._results)))
        return sent, state, results, kept

    def backward(
        self, kept: SavedTensors, cotangents: Sequence[Any], counts: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of what was received, and slices of gradients; the rest is added up.

        Args:
            counts: False for padding, whose gradients are taken as 0.
        """
        return self._functions.backward(kept, cotangents, counts)

    def input_gradient(self, kept: SavedTensors, cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of what was received; the rest waits for `weight_gradient`."""
        return self._functions.input_gradient(kept, cotangents)

    def weight_gradient(self, kept: SavedTensors, counts: bool = True) -> list[Any]:
        """Add up the gradients of variables; returns slices."""
        return self._functions.weight_gradient(kept, counts)

    # -- tracing

    def _trace(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        count_seeds_from(self.stage.index)
        given = self.specs.like(values)
        stage, training = self.stage, self.mode == "train"
        variables = [*stage.trainable, *self.state]
        mapping = list(zip(variables, [*given.trainable, *given.state], strict=True))
        received = given.received[:-1]
        sources = [*given.trainable, *(t for t in received if is_differentiable(t))]
        sources += [given.received[-1]] if self.adds else []
        with (
            StageScope(state_mapping=mapping, collect_losses=True) as scope,
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            if training:
                tape.watch(sources)
            added, results, sent = self._compute(given, scope)
        scope.refuse_dropped(self.settings.model)
        _refuse_assigned(stage.trainable, given.trainable, scope)
        self._sent = [*sent, added] if self.sends_outputs else []
        self._results = results
        old = zip(self.state, given.state, strict=True)
        new = [(v, scope.get_current_value(v), before) for v, before in old]
        self.changes = [v for v, after, before in new if after is not before]
        self._state = [after for _, after, before in new if after is not before]
        if training:
            self._differentiate(tape, sources, given)
        return [*self._sent, *self._results, *self._state]

    def _compute(self, given: Arguments, scope: Any) -> tuple[Any, list[Any], list[Any]]:
        """(losses that layers added so far, results of the last stage, what is sent)."""
        stage, model = self.stage, self.settings.model
        context = StepContext(
            given.scalars[0],
            rank=self.settings.replica,
            stage=self.stage.index,
            shared_seeds=self._shared_seeds,
            uniform=self._uniform,
            rows_of_draws=self._rows,
            denominators=tf.unstack(given.denominators[0]) if given.denominators else [],
            split=self.settings.split and self.mode != "predict",
        )
        tensors = dict(zip(stage.receives, given.received[:-1], strict=True))
        tensors |= dict(zip(stage.inputs, given.data, strict=False))
        with keras_patches(context, optimizers_of(model)):
            run_nodes(stage.nodes, tensors)
            own = self._added_here(scope.losses, context, given)
            added = given.received[-1] + tf.cast(own, given.received[-1].dtype)
            if not stage.is_last:
                return added, [], [tf.identity(tensors[i]) for i in stage.sends]
            y_pred = outputs_of(stage.graph, tensors)
            if self.mode == "predict":
                self.logs = keras.tree.map_structure(lambda t: None, y_pred)
                return added, list(keras.tree.flatten(y_pred)), []
            data = with_leaves(self._data, given.data)
            if self.sends_outputs:
                sent = [tf.identity(tensors[i]) for i in stage.graph.needed_at_the_end]
            else:
                sent, losses = [], [added] if self.adds else []
                loss = loss_of(model, data, y_pred, losses, self.mode == "train")
                count_loss(model, data, loss)  # as Keras does: of a vector the mean
                self._loss = self._counted([*scope.losses, loss], context, given)[-1]
            # A metric may return its variable itself, which has its value inside this scope.
            logs = keras.tree.map_structure(_value_of, metrics_of(model, data, y_pred))
        self.logs = logs
        return added, list(keras.tree.flatten(logs)), sent

    def _added_here(self, losses: Sequence[Any], context: StepContext, given: Arguments) -> Any:
        """The sum of the losses that this stage's layers and variables have added."""
        floats = keras.config.floatx()
        mine = self._counted([keras.ops.cast(x, floats) for x in losses], context, given)
        variables = self.settings.regularised.get(self.stage.index, ())
        mine += [keras.ops.sum(keras.ops.cast(v.regularizer(v), floats)) for v in variables]
        self.adds = self.adds or bool(mine)
        return tf.add_n(mine) if mine else tf.zeros((), floats)

    def _counted(self, losses: Sequence[Any], context: StepContext, given: Arguments) -> list[Any]:
        """Each loss as a number. What Keras sums over examples is a sum over all microbatches and
        replicas; what has other elements, of weights for one, is the same in each of them."""
        sums = [keras.ops.sum(x) for x in losses]
        if all(x.shape.rank == 0 for x in losses):
            return sums
        try:
            shapes = loss_shapes_of_any_batch(
                self.settings.model,
                self.stage,
                given.received[:-1],
                self._data,
                self.mode == "train",
            )
        except Exception:  # code that needs to know the number of examples
            shapes = []
        if len(shapes) < len(losses):
            over = [x.shape.rank is None or x.shape[:1] == [self._rows] for x in losses]
        else:
            over = [s.rank is None or (s.rank > 0 and s[0] is None) for s in shapes]
        pairs = zip(sums, over, strict=False)
        return [context.as_mean(total) if varies else total for total, varies in pairs]

    def _differentiate(self, tape: tf.GradientTape, sources: list[Any], given: Arguments) -> None:
        weight, seed = given.scalars
        if self.sends_outputs:
            targets = [t for t in self._sent[:-1] if is_differentiable(t)]
            # Losses of layers may be weighted by `compute_loss`, or ignored.
            targets += [self._sent[-1]] if self.adds else []
            cotangents = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
            placeholders = cotangents
        else:
            seed = tf.cast(seed, self._loss.dtype)
            targets, cotangents, placeholders = [self._loss], [seed], []
        found = tape.gradient(targets, sources, output_gradients=cotangents)
        trainable = self.stage.trainable
        of_inputs = [
            # Zeros where the loss does not depend on what was received.
            tf.zeros(s.shape, s.dtype) if g is None else tf.convert_to_tensor(g)
            for g, s in zip(found[len(trainable) :], sources[len(trainable) :], strict=True)
        ]
        # Both; the one that is not chosen is never run.
        plain = list(zip(trainable, found[: len(trainable)], strict=True))
        weighted = [(v, _weighted(g, weight)) for v, g in plain]
        self._gradients = Gradients(of_inputs, weighted, placeholders, seed)
        self._of_weighted_loss = Gradients(of_inputs, plain, placeholders, seed)


def _refuse_assigned(weights: Sequence[Any], values: Sequence[Any], scope: Any) -> None:
    for weight, value in zip(weights, values, strict=True):
        if scope.get_current_value(weight) is not value:
            raise ModelError(explain_assigned_weight(f"the layer of {weight.path}"))


def _value_of(result: Any) -> Any:
    return tf.identity(result.value) if isinstance(result, keras.Variable) else result


def _weighted(gradient: Any, weight: tf.Tensor) -> Any:
    """A microbatch's gradient by its part of the update, in the type of the weights."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _weighted(gradient.values, weight)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = widened(gradient)
    return tf.cast(wide * tf.cast(weight, wide.dtype), gradient.dtype)
