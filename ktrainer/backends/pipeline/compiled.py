"""The compiled stages of this process, for each mode and each shape of microbatch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from ktrainer.backends.pipeline.arguments import Arguments, Mode, StageSettings
from ktrainer.backends.pipeline.cut import StageGraph
from ktrainer.backends.pipeline.global_loss import GlobalLoss
from ktrainer.backends.pipeline.head import Denominators
from ktrainer.backends.pipeline.microbatches import Microbatch, leaves, specs_of
from ktrainer.backends.pipeline.planned import PlannedModel
from ktrainer.backends.pipeline.post import Post
from ktrainer.backends.pipeline.stage import CompiledStage
from ktrainer.errors import ModelError
from ktrainer.feed.specs import spec_of
from ktrainer.steps.model_step import global_seed


class CompiledModel:
    """Compiles this process's stages when a microbatch of a new shape appears.

    All partitions then do so together, each telling the next one the shapes of what it will send;
    those of one replica see the same batches, so they know when.

    Args:
        planned: the model, cut and placed.
        settings: of this process.
        post: to the other partitions.
        global_loss: computes losses on whole batches; None: each microbatch has its own.
    """

    def __init__(
        self,
        planned: PlannedModel,
        settings: StageSettings,
        post: Post,
        global_loss: GlobalLoss | None = None,
    ) -> None:
        self.planned, self.settings, self.post = planned, settings, post
        self.global_loss = global_loss
        self._partitions = planned.config.partitions
        self._made: dict[Any, list[CompiledStage]] = {}
        self._denominators: dict[Any, Denominators] = {}
        self.uniform = True
        self._seed = global_seed()

    def forget(self, uniform: bool) -> None:
        """Compile anew: the data has other shapes from now on."""
        self.uniform = uniform
        self._made.clear()
        self._denominators.clear()

    @contextmanager
    def with_global_seed(self) -> Iterator[None]:
        """Draw from the global generator that was there when the stages were compiled: Keras makes
        a new one when somebody sets the seed, from which compiled steps do not draw."""
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
                self._tell(made[-1])
                self._check_moves(made[-1])
            self._complete(made, specs_of(microbatch))
            self._made[key] = made
            gc.collect()  # traces are cyclic, and the first step is where memory peaks
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
            state += self.settings.model.metrics_variables
        return list({id(v): v for v in state}.values())

    def _trace(
        self, stage: StageGraph, mode: Mode, microbatch: Microbatch, before: list[CompiledStage]
    ) -> CompiledStage:
        model, state, data = self.settings.model, self._state(stage, mode), specs_of(microbatch)
        received, adds, bends = self._told(stage, before)
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
        settings, uniform = self.settings, self.uniform
        return CompiledStage(stage, mode, settings, state, arguments, data, adds, bends, uniform)

    def _told(self, stage: StageGraph, before: list[CompiledStage]) -> tuple[list[Any], bool, bool]:
        """Shapes and types of what a stage receives, whether layers before it add losses, and
        whether they have custom gradients."""
        if not stage.index:
            return [((), keras.config.floatx())], False, False
        if self._partitions == 1:
            return _facts(before[-1])
        partition = (stage.index - 1) % self._partitions
        return self.post.hear(partition, "the shapes of activations")

    def _complete(self, made: list[CompiledStage], data: Any) -> None:
        """Tell from the last stage to the first what the loss depends on, and whether it is
        weighted, which the last one knows; then compile."""
        reaching: list[bool] = []
        weighs = self.settings.may_weigh_losses and not made[-1].bends
        if self.global_loss is not None:  # each microbatch's part of the loss has its weight in it
            weighs = True
            if made[-1].stage.is_last and made[-1].mode == "train":
                reaching = self.global_loss.reaches(made[-1], data)
        for compiled in reversed(made):
            stage, what = compiled.stage, "what the loss depends on"
            if not stage.is_last and self._partitions > 1 and compiled.mode == "train":
                reaching, weighs = self.post.hear((stage.index + 1) % self._partitions, what)
            reaching = compiled.reach(reaching, weighs)
            if stage.index and self._partitions > 1 and compiled.mode == "train":
                self.post.tell((reaching, weighs), (stage.index - 1) % self._partitions, what)
        for compiled in made:  # all processes at the same time
            compiled.compile()

    def _check_moves(self, stage: CompiledStage) -> None:
        """Refuse statistics that several partitions would each move by themselves."""
        for variable in stage.changes:
            holders = self.planned.holders.get(id(variable), [])
            # A seed may move: each process draws from a copy of its own.
            if len(holders) > 1 and tf.as_dtype(variable.dtype).is_floating:
                raise ModelError(
                    f"{variable.path!r} is moved by the stages of several processes, {holders}; "
                    "put all calls of its layer on one stage, with backend.stages or "
                    "`with ktrainer.partition(i):`"
                )

    def _tell(self, stage: CompiledStage) -> None:
        after = (stage.stage.index + 1) % self._partitions
        if not stage.stage.is_last and self._partitions > 1:
            _check_static(stage)
            self.post.tell(_facts(stage), after, "the shapes of activations")


def _inputs_of(microbatch: Microbatch) -> Any:
    """Specs of a microbatch's inputs, of which any number may come."""
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
    return sent, stage.adds, stage.bends


def _dtype(variable: Any) -> str:
    return keras.backend.standardize_dtype(variable._dtype)
