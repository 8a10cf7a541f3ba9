"""Broadcast one rank's variables to all ranks before the first step.

Events used: `on_train_begin` (arm), `on_epoch_begin` (broadcast, before any step), `on_restore`
(broadcast again). Under `Model.fit` alone, a model without an Input layer gets its variables when
its training step is traced: the first call of Keras' `train_function` does that, then broadcasts.

Horovod's callback broadcasts at the end of the first batch, so its first step trains on
different weights; here it happens before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ktrainer.callbacks.base import Callback
from ktrainer.distributed import World
from ktrainer.errors import ModelError
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables, slots_of
from ktrainer.steps.named_variables import built_optimizers, model_variables
from ktrainer.steps.program_interface import Program
from ktrainer.steps.variable_broadcast import broadcast_variables, equalise_partitions
from ktrainer.steps.variable_placement import finalize_normalization, placement_of


class BroadcastVariables(Callback):
    """Give every rank the model's and optimizers' variables of rank `root`, before step 1.

    That covers weights, moving statistics, seed generators, optimizer slots, counters and
    learning rates; not metrics, whose states belong to each rank, nor local layers.

    Of a model in partitions, each rank holds some variables. Those that several partitions hold
    are made equal within every replica; then all replicas get the variables of replica `root`.

    Raises:
        ModelError: several ranks, and a model that has no variables yet and runs eagerly.
        DivergenceError: ranks hold different lists of variables; it names the differences.
    """

    def __init__(self, root: int = 0, world: World | None = None) -> None:
        super().__init__()
        self.root = root
        self._own_world = world
        self.local: list[Any] = []  # variables that, with their slots, are not broadcast
        self._pending = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._pending = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if not self._pending:
            return
        keras_trains = self.model.train_function is not None and not self.model.run_eagerly
        if _has_variables(self.model) or self.world.size == 1 or not keras_trains:
            self._broadcast()
            return
        self._train = self.model.train_function
        self.model.train_function = self._broadcast_and_train

    def _broadcast(self, traced: bool = False) -> None:
        traced = traced or self.trainer is not None  # which has built the program
        broadcast_model(self.model, self.world, self.root, self.local, traced=traced)
        self._pending = False

    def _broadcast_and_train(self, iterator: Any) -> Any:
        """The first call of Keras' `train_function`."""
        self.model.train_function = self._train
        # Tracing a step makes all variables, and computes nothing.
        tf.function(self.model.train_step).get_concrete_function(iterator.element_spec)
        self._broadcast(traced=True)
        return self._train(iterator)

    def on_restore(self, progress: Progress) -> None:
        self._broadcast()

    def on_heal(self, progress: Progress) -> None:
        self._pending = progress.step == 0  # later they are equal already


def broadcast_model(
    model: Any,
    world: World,
    root: int = 0,
    local: Sequence[Any] = (),
    traced: bool = False,
) -> None:
    """Broadcast all variables of `model` and of the optimizers that it holds, but local ones.

    Args:
        root: a rank, or a replica if the model is in partitions.
        local: variables that are local, besides those of the model's local layers; Keras', or the
            `tf.Variable`s of these.
        traced: whether a step was traced, which makes all variables that it uses. Layers that are
            not built then are for another step.
    """
    if world.size == 1:
        return
    if not _can_be_broadcast(model, traced):
        raise ModelError(
            f"the model {model.name!r} has no variables yet, so they cannot be made equal on all "
            f"{world.size} ranks before the first step. Give it an Input layer, or call "
            "model.build(input_shape), or call it on one batch before training."
        )
    placement = placement_of(model)
    if placement is not None:
        equalise_partitions(model, placement)
        world = placement.copies
    values = {id(getattr(variable, "_value", variable)) for variable in local}
    named = model_variables(model)
    own = {id(v) for _, v in named if id(getattr(v, "_value", v)) in values}
    own |= {*slots_of(built_optimizers(model), own), *local_variables(model)}
    broadcast_variables([(name, v) for name, v in named if id(v) not in own], world, root)
    finalize_normalization(model)


def broadcast_once(program: Program, world: World, traced: bool = False) -> None:
    """Broadcast the variables of a program's model, unless that was done since it was compiled and
    none was made since, or it has none yet.

    Args:
        traced: as `broadcast_model` takes it.
    """
    count = len(program.model.variables)
    needed = count != program.shared_variables and _can_be_broadcast(program.model, traced)
    if world.heals:  # a rank that has joined may have another history
        needed = world.any(needed, "are variables to be broadcast")
    if needed:
        broadcast_model(program.model, world, traced=traced)
        program.shared_variables = count


def _can_be_broadcast(model: Any, traced: bool) -> bool:
    """Whether all variables exist that the next step uses; nothing traces one that is eager."""
    return _has_variables(model) or (traced and bool(model.variables) and not model.run_eagerly)


def _has_variables(model: Any) -> bool:
    """Whether all variables exist. A model with a `train_step` of its own may never be called
    itself, and then counts as not built, while its layers are."""
    layers = list(model._flatten_layers(include_self=False))
    return model.built or (bool(layers) and all(layer.built for layer in layers))
