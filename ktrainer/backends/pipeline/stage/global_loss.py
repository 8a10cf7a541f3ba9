"""The loss of a whole batch, for `trainer.loss_scope=global`.

The last stage sends its outputs, as a stage in the middle does. Once it has run all microbatches
forward, their outputs, targets and weights, and those of the other replicas, are concatenated in
the order of the batch; Keras computes the loss on them as in one process; and each microbatch goes
backward from its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from keras.src.metrics import reduction_metrics

from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.partition.stage_graphs import is_differentiable
from ktrainer.backends.pipeline.stage.compiled_stage import CompiledStage
from ktrainer.backends.pipeline.stage.loss_head import loss_of, outputs_of
from ktrainer.backends.pipeline.stage.microbatches import Microbatch, leaves, with_leaves
from ktrainer.backends.pipeline.stage.stage_settings import Mode, StageScope
from ktrainer.distributed import World
from ktrainer.errors import DataError, ModelError
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps.step_context import StepContext, tracing

_WHAT = "the outputs of all replicas, for trainer.loss_scope=global"


class GlobalLoss:
    """Loss and gradients of the outputs of all microbatches together, on the last stage.

    Args:
        model: the whole model.
        trainable: the trained variables that this process holds.
        replicas: the copies of the last stage, in the order of their parts of a batch.

    Attributes:
        changes: the variables that computing the loss has changed so far: its metrics, and seeds.
    """

    def __init__(self, model: keras.Model, trainable: Sequence[Any], replicas: World) -> None:
        self.model, self.trainable, self.replicas = model, list(trainable), replicas
        self.changes: dict[int, Any] = {}
        self._functions: dict[Any, Any] = {}
        self._reads_inputs = type(model).compute_loss is not keras.Model.compute_loss

    def used_outputs(self, stage: CompiledStage, data: Any) -> list[bool]:
        """Find what the loss depends on: of the stage's outputs that have a gradient, and of the
        losses that layers add.

        Args:
            stage: the last one.
            data: nested specs of a microbatch.
        """
        self._check_rows(stage, leaves(data)[0].shape[0])
        function = self._function(stage)
        floats = tf.TensorSpec([], tf.float64)
        concrete = function.get_concrete_function(
            stage.sends[:-1],
            self._read(data),
            tf.TensorSpec([], stage.sends[-1].dtype),
            [tf.TensorSpec(v.shape, v.value.dtype) for v in self.trainable],
            list(stage.specs.state),
            floats,
            floats,
        )
        gradients, _ = concrete.structured_outputs
        return [g is not None for g in gradients]

    def __call__(
        self,
        stages: Sequence[CompiledStage],
        sent: Sequence[Sequence[Any]],
        microbatches: Sequence[Microbatch],
        trainable: Mapping[int, Any],
        state: dict[int, Any],
        scale: float,
    ) -> list[list[Any]]:
        """The gradients of the outputs, scaled, for each microbatch; the metrics of the loss are
        counted.

        Args:
            stages: the last stage as compiled for each microbatch.
            sent: what it has sent for each: outputs, their masks, and the losses added by layers.
            microbatches: of this replica.
            trainable, state: values of variables by `id()`; `state` is brought up to date.
            scale: the loss scale.
        """
        outputs, data, added, start = self._gather(sent, microbatches)
        portion = sum(m.weight for m in microbatches)
        if not portion:  # padding, which has a part neither in gradients nor in metrics
            return [[tf.zeros(s.shape, s.dtype) for s in m.gradient_specs] for m in stages]
        stage = stages[0]
        gradients, changed = self._function(stage)(
            outputs,
            data,
            tf.constant(added, stage.sends[-1].dtype),
            [trainable[id(v)] for v in self.trainable],
            [state[id(v)] for v in stage.state],
            tf.constant(portion, tf.float64),
            tf.constant(scale, tf.float64),
        )
        self._keep(stage, changed, state, first=start == 0)
        if not gradients:
            return []
        return [list(parts) for parts in _by_microbatch(gradients, stages, microbatches, start)]

    def _keep(
        self, stage: CompiledStage, changed: dict[str, Any], state: dict[int, Any], first: bool
    ) -> None:
        """Bring `state` up to date. Metrics that are no means, of what is the same on all replicas,
        are counted by the first one alone."""
        metrics = [m for m in self.model.metrics if not isinstance(m, keras.metrics.Mean)]
        once = {id(v) for metric in metrics for v in metric.variables}
        for index, value in changed.items():
            variable = stage.state[int(index)]
            if first or id(variable) not in once:
                state[id(variable)] = value
                self.changes[id(variable)] = variable

    # -- gathering

    def _gather(
        self, sent: Sequence[Sequence[Any]], microbatches: Sequence[Microbatch]
    ) -> tuple[list[Any], Any, float, int]:
        """(outputs and masks, data, added losses) of the whole batch, and the first row in it that
        is this replica's."""
        real = [k for k, m in enumerate(microbatches) if m.weight]
        read = [self._read(m.data) for m in microbatches]
        mine = [[*sent[k][:-1], *leaves(read[k])] for k in real]
        together = [tf.concat(parts, 0) for parts in zip(*mine, strict=True)]
        added = float(sum(microbatches[k].weight * float(sent[k][-1]) for k in real))
        start = 0
        if self.replicas.size > 1:
            together, added, start = self._over_replicas(together, added)
        count = len(sent[0]) - 1
        return together[:count], with_leaves(read[0], together[count:]), added, start

    def _over_replicas(self, mine: list[Any], added: float) -> tuple[list[Any], float, int]:
        parts = self.replicas.allgather(([x.numpy() for x in mine], added), _WHAT)
        rows = [len(arrays[0]) if arrays else 0 for arrays, _ in parts]
        try:
            whole = [
                tf.convert_to_tensor(np.concatenate(arrays))
                for arrays in zip(*(arrays for arrays, _ in parts if arrays), strict=True)
            ]
        except ValueError as error:
            raise DataError(
                "trainer.loss_scope=global puts the batches of all replicas together, but they "
                f"have other shapes ({error}): give all of them the same, with data.shard=batch or "
                "padding to a fixed length"
            ) from None
        return whole, sum(a for _, a in parts), sum(rows[: self.replicas.rank])

    def _read(self, data: Any) -> Any:
        """The data that the loss is computed from: Keras' own `compute_loss` reads no inputs."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return (x if self._reads_inputs else None, y, sample_weight)

    def _check_rows(self, stage: CompiledStage, rows: int) -> None:
        graph = stage.stage.graph
        for i, spec in zip(graph.needed_at_the_end, stage.sends, strict=False):
            found = spec.shape[0] if spec.shape.rank else None
            if found != rows:
                raise ModelError(
                    f"output {graph.tensors[i].name!r} has shape {tuple(spec.shape)} for {rows} "
                    "examples, but trainer.loss_scope=global puts microbatches together by "
                    "examples: return one row for each example. Two views of an example are two "
                    "outputs, or are stacked along axis 1; the loss may join them along axis 0"
                )

    # -- computing

    def _function(self, stage: CompiledStage) -> Any:
        key = (stage.mode, id(stage.stage.graph), stage.adds)
        if key not in self._functions:
            graph, mode, adds, state = stage.stage.graph, stage.mode, stage.adds, stage.state
            self._functions[key] = tf.function(
                lambda *values: self._compute(graph, mode, adds, state, *values), autograph=False
            )
        return self._functions[key]

    def _compute(
        self,
        graph: Graph,
        mode: Mode,
        adds: bool,
        state: list[Any],
        outputs: list[Any],
        data: Any,
        added: tf.Tensor,
        trainable: list[Any],
        before: list[Any],
        portion: tf.Tensor,
        scale: tf.Tensor,
    ) -> tuple[list[Any], dict[str, Any]]:
        """(gradients of the outputs that have one, and of the losses that layers add; None where
        the loss does not depend on it; the changed state by place)."""
        training = mode == "train"
        variables = [*self.trainable, *state]
        mapping = list(zip(variables, [*trainable, *before], strict=True))
        sources = [t for t in outputs if is_differentiable(t)] + [added] * adds
        with (
            StageScope(state_mapping=mapping) as scope,
            tf.GradientTape(watch_accessed_variables=False) as tape,
            scale_mean_metrics(portion),
            tracing(StepContext(portion, in_global_loss=True)),
        ):
            if training:
                tape.watch([*sources, *trainable])
            tensors = dict(zip(graph.needed_at_the_end, outputs, strict=True))
            y_pred = outputs_of(graph, tensors)
            loss = loss_of(self.model, data, y_pred, [added] if adds else [], training)
            self.model._loss_tracker.update_state(loss, sample_weight=tf.shape(outputs[0])[0])
        scope.refuse_dropped(self.model)
        after = [scope.get_current_value(v) for v in state]
        pairs = enumerate(zip(before, after, strict=True))
        changed = {str(k): new for k, (old, new) in pairs if new is not old}
        if not training:
            return [], changed
        seed = tf.ones_like(loss) * tf.cast(scale, loss.dtype)
        found = tape.gradient(loss, [*sources, *trainable], output_gradients=seed)
        self._refuse_weights(found[len(sources) :])
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in found[: len(sources)]]
        return gradients, changed

    def _refuse_weights(self, gradients: Sequence[Any]) -> None:
        for variable, gradient in zip(self.trainable, gradients, strict=True):
            if gradient is not None:
                raise ModelError(
                    f"the loss of model {self.model.name!r} reads the weight {variable.path!r}. "
                    "With trainer.loss_scope=global a pipeline trains weights through the model's "
                    "outputs alone: read it in a layer's call, and return what the loss needs"
                )


def _by_microbatch(
    gradients: Sequence[Any],
    stages: Sequence[CompiledStage],
    microbatches: Sequence[Microbatch],
    start: int,
) -> Iterator[list[Any]]:
    """The rows of each microbatch, and its part of the gradient of added losses; zeros where the
    loss does not depend on an output."""
    for stage, microbatch in zip(stages, microbatches, strict=True):
        stop, weight = start + microbatch.rows, microbatch.weight
        parts = []
        for gradient, spec in zip(gradients, stage.gradient_specs, strict=True):
            if gradient is None:
                parts.append(tf.zeros(spec.shape, spec.dtype))
            else:
                rows = spec.shape.rank > 0
                parts.append(gradient[start:stop] if rows else gradient * weight)
        yield parts
        start = stop


@contextmanager
def scale_mean_metrics(portion: tf.Tensor) -> Iterator[None]:
    """Weight means by this replica's part of the batch.

    All replicas compute the same loss, and their metrics are summed.
    """
    original = reduction_metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        values = ops.convert_to_tensor(values)
        part = tf.cast(portion, self.dtype)
        # Keras counts each part of a loss once a batch, but with its rows where their number is
        # static, as it is here.
        once = isinstance(sample_weight, int) and values.shape.rank == 0
        if sample_weight is None or once:
            each = part if values.shape.rank == 0 else tf.fill(tf.shape(values)[:1], part)
            return original(self, values, each)
        return original(self, values, ops.cast(sample_weight, self.dtype) * part)

    with replaced((reduction_metrics.Mean, "update_state", update_state)):
        yield
