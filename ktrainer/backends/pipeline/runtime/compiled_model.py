"""The compiled stages of this process, for each mode and each shape of microbatch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.backends.pipeline.stage.compiled_stage import CompiledStage
from ktrainer.backends.pipeline.stage.global_loss import GlobalLoss
from ktrainer.backends.pipeline.stage.loss_head import Denominators
from ktrainer.backends.pipeline.stage.microbatches import Microbatch, leaves, specs_of
from ktrainer.backends.pipeline.stage.stage_settings import Arguments, Mode, StageSettings
from ktrainer.data.batch_specs import spec_of
from ktrainer.distributed import World
from ktrainer.errors import ModelError
from ktrainer.steps.named_variables import variables_in
from ktrainer.steps.step_helpers import global_seed


class CompiledModel:
    """Compiles this process's stages when a microbatch of a new shape appears.

    All partitions of a replica do so at the same microbatch, and each sends the next one the shapes
    of its activations.

    Args:
        planned: the model, cut and placed.
        settings: of this process.
        transport: to the other partitions.
        global_loss: computes losses on whole batches; None: each microbatch has its own.
    """

    def __init__(
        self,
        planned: PlannedModel,
        settings: StageSettings,
        transport: Transport,
        global_loss: GlobalLoss | None = None,
    ) -> None:
        self.planned, self.settings, self.transport = planned, settings, transport
        self.global_loss = global_loss
        self._partitions = planned.config.partitions
        self._made: dict[Any, list[CompiledStage]] = {}
        self._denominators: dict[Any, Denominators] = {}
        self.uniform = True
        self._seed = global_seed()
        of_loss = variables_in(getattr(settings.model, "loss", None))
        self._of_loss = [v for v in of_loss if isinstance(v, keras.Variable)]

    def forget(self, uniform: bool) -> None:
        """Drop the compiled stages, since the shapes of the data have changed."""
        self.uniform = uniform
        self._made.clear()
        self._denominators.clear()

    @contextmanager
    def with_global_seed(self) -> Iterator[None]:
        """Draw from the global generator of the time when the stages were compiled.

        Keras makes a new one when the seed is set, from which compiled steps do not draw.
        """
        present = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._seed)
        try:
            yield
        finally:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, present)

    def stages(self, mode: Mode, microbatch: Microbatch) -> list[CompiledStage]:
        """This process's stages for microbatches like this one, in order."""
        key = (mode, microbatch.shapes)
        if key not in self._made:
            if self.planned.by_shape:
                self.planned.trace_for(_inputs_of(microbatch))
            made: list[CompiledStage] = []
            for stage in self._mine(mode):
                made.append(self._trace(stage, mode, microbatch, made))
                self._send_specs(made[-1])
                self._check_statistics(made[-1])
            self._complete(made, specs_of(microbatch))
            self._made[key] = made
            gc.collect()  # traces are cyclic, and memory peaks in the first step
        return self._made[key]

    def denominators(self, mode: Mode, microbatch: Microbatch) -> Denominators:
        """Counts what the losses of such a microbatch are divided by; on the last stage."""
        return self._denominators[mode, microbatch.shapes]

    def state(self, mode: Mode) -> list[Any]:
        """The variables that this process's stages may change."""
        every = [v for stage in self._mine(mode) for v in self._state(stage, mode)]
        return list({id(v): v for v in every}.values())

    def _mine(self, mode: Mode) -> list[StageGraph]:
        stages = self.planned.stages(mode == "train")
        return [s for s in stages if s.index % self._partitions == self.planned.partition]

    def _state(self, stage: StageGraph, mode: Mode) -> list[Any]:
        state = [*stage.non_trainable, self._seed.state]
        if stage.is_last and mode != "predict":
            state += [*self.settings.model.metrics_variables, *self._of_loss]
        return list({id(v): v for v in state}.values())

    def _trace(
        self, stage: StageGraph, mode: Mode, microbatch: Microbatch, before: list[CompiledStage]
    ) -> CompiledStage:
        model, state, data = self.settings.model, self._state(stage, mode), specs_of(microbatch)
        received, adds, custom_gradients = self._received_specs(stage, before)
        count = 0
        if stage.is_last and mode != "predict" and self.global_loss is None:
            denominators = Denominators(model, stage, data, mode == "train", self.uniform)
            self._denominators[mode, microbatch.shapes] = denominators
            count = denominators.count
        every = leaves(data)
        arguments = Arguments(
            trainable=[tf.TensorSpec(v.shape, _dtype(v)) for v in stage.trainable],
            state=[tf.TensorSpec(v.shape, _dtype(v)) for v in state],
            received=[tf.TensorSpec(shape, dtype) for shape, dtype in received],
            data=every if stage.is_last else [every[k] for k in stage.inputs],
            scalars=[tf.TensorSpec([], tf.float64)] * 2,
            denominators=[tf.TensorSpec([count], tf.float64)] * bool(count),
        )
        several = [v for v in stage.non_trainable if len(self.planned.holders.get(id(v), ())) > 1]
        return CompiledStage(
            stage,
            mode,
            self.settings,
            state,
            arguments,
            data,
            adds,
            custom_gradients,
            self.uniform,
            shared_seeds={id(v) for v in [self._seed.state, *several]},
        )

    def _received_specs(
        self, stage: StageGraph, before: list[CompiledStage]
    ) -> tuple[list[Any], bool, bool]:
        """Shapes and types that a stage receives; whether earlier layers add losses, and whether
        they have custom gradients."""
        if not stage.index:
            return [((), keras.config.floatx())], False, False
        if self._partitions == 1:
            return _facts(before[-1])
        partition = (stage.index - 1) % self._partitions
        return self.transport.receive_object(partition, "the shapes of activations")

    def _complete(self, made: list[CompiledStage], data: Any) -> None:
        """Prune gradients from the last stage to the first, then compile.

        Each stage sends the one before it what the loss depends on, and whether the loss is
        weighted.
        """
        used: list[bool] = []
        weighs = self.settings.may_weigh_losses and not made[-1].has_custom_gradients
        if self.global_loss is not None:  # each microbatch's part of the loss has its weight in it
            weighs = True
            if made[-1].stage.is_last and made[-1].mode == "train":
                used = self.global_loss.used_outputs(made[-1], data)
        for compiled in reversed(made):
            stage, what = compiled.stage, "what the loss depends on"
            if not stage.is_last and self._partitions > 1 and compiled.mode == "train":
                used, weighs = self.transport.receive_object(
                    (stage.index + 1) % self._partitions, what
                )
            used = compiled.prune(used, weighs)
            if stage.index and self._partitions > 1 and compiled.mode == "train":
                self.transport.send_object(
                    (used, weighs), (stage.index - 1) % self._partitions, what
                )
        for compiled in made:  # all processes at the same time
            compiled.compile()

    def _check_statistics(self, stage: CompiledStage) -> None:
        """Refuse statistics that several partitions would each update."""
        for variable in stage.changes:
            holders = self.planned.holders.get(id(variable), [])
            # Seeds may change: each process draws from a copy of its own.
            if len(holders) > 1 and tf.as_dtype(variable.dtype).is_floating:
                raise ModelError(
                    f"{variable.path!r} is updated by the stages of several processes, {holders}; "
                    "put all calls of its layer on one stage, with backend.stages or "
                    "`with ktrainer.partition(i):`"
                )

    def _send_specs(self, stage: CompiledStage) -> None:
        after = (stage.stage.index + 1) % self._partitions
        if not stage.stage.is_last and self._partitions > 1:
            _check_static(stage)
            self.transport.send_object(_facts(stage), after, "the shapes of activations")


def _inputs_of(microbatch: Microbatch) -> Any:
    """Specs of a microbatch's inputs, for any number of rows."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(microbatch.data)
    return spec_of(inputs)


def _check_static(stage: CompiledStage) -> None:
    """Refuse activations whose size is known only once they are computed.

    Raises:
        ModelError: the next stage could not make room for them.
    """
    unknown = [tuple(spec.shape) for spec in stage.sends if None in tuple(spec.shape)]
    if unknown:
        raise ModelError(
            f"stage {stage.stage.index} sends activations of shape {unknown[0]}, whose size is "
            "known only once they are computed (a random resize, a boolean mask), but the next "
            "stage must know it before. Keep the layers up to where the size is fixed on one "
            "stage, with backend.stages or ktrainer.partition, or move them into the input "
            "pipeline; or train with backend=data_parallel."
        )


def _facts(stage: CompiledStage) -> tuple[list[Any], bool, bool]:
    sent = [(tuple(spec.shape), spec.dtype.name) for spec in stage.sends]
    return sent, stage.adds, stage.has_custom_gradients


def _dtype(variable: Any) -> str:
    return keras.backend.standardize_dtype(variable._dtype)


def synchronize_seeds(variables: Sequence[Any], model: keras.Model, copies: World) -> None:
    """Give all replicas the seeds of the one that drew most.

    A replica with fewer microbatches, in the last batch of an epoch, draws less, and a checkpoint
    keeps one state for all.

    Args:
        variables: the seeds are among these.
        model: its metrics have integers that are no seeds.
        copies: the copies of this partition.
    """
    metrics = {id(v) for v in model.metrics_variables}
    seeds = [v for v in variables if not tf.as_dtype(v.dtype).is_floating]
    seeds = [v for v in seeds if id(v) not in metrics]
    if copies.size == 1 or not seeds:
        return
    flat = np.concatenate([v.numpy().reshape(-1).astype(np.int64) for v in seeds])
    most = copies.oob_allreduce(flat, "max", "seeds of replicas")
    stops = np.cumsum([int(np.prod(v.shape)) for v in seeds])
    for variable, value in zip(seeds, np.split(most, stops[:-1]), strict=True):
        variable.assign(value.reshape(variable.shape).astype(variable.dtype))
