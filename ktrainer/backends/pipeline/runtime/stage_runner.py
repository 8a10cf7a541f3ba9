"""This process's stage of a cut model, for steps of a user's own: its passes.

Eagerly each pass runs at once; inside of a `tf.function` it is recorded. Unlike the stages of
`compiled_stage.py`, which end in a loss, these end in outputs, which every process gets, and of
which each differentiates the same loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from ktrainer.backends.pipeline.check_supported import explain_assigned_weight
from ktrainer.backends.pipeline.graph.nodes import Graph, losses_collected, run_nodes
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph, is_differentiable
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.stage_messages import StageMessages
from ktrainer.backends.pipeline.runtime.transport import WaitTime
from ktrainer.distributed import World
from ktrainer.distributed.collectives import InOrder
from ktrainer.errors import DivergenceError, ModelError, WorldError
from ktrainer.steps.remote_variable import zeros_if_remote
from ktrainer.steps.step_context import current_step

_unfinished: WeakSet[World] = WeakSet()  # stages of which a step has begun, and not ended
_COMPARED_STEPS = 3


@dataclass
class ForwardPass:
    """A forward pass, kept for the backward pass of the same microbatch.

    Attributes:
        stage: what was computed.
        tape: of it.
        inputs: the model's inputs that are differentiated.
        received: what was received of the stage before, where it has a gradient.
        targets: what was sent, or the outputs, where they have one.
        added: the losses that this stage's layers and weights have added; None if no stage has any.
        made: on the last stage, outputs, their masks, and the losses that all stages have added.
        specs: of these.
    """

    stage: StageGraph
    tape: Any
    inputs: list[Any]
    received: list[Any]
    targets: list[Any]
    added: Any
    made: list[Any]
    specs: list[tf.TensorSpec]


class StageRunner:
    """Runs the stage that this process holds.

    Args:
        planned: the model, cut and placed.
        waits: accumulates the time spent waiting for other stages.

    Attributes:
        held: the trained variables that are held here, in the model's order.
        shared: those that several stages hold, whether this one does or not.
        messages: to and from the other stages.
    """

    def __init__(self, planned: PlannedModel, waits: WaitTime | None = None) -> None:
        self.planned, self.partition = planned, planned.partition
        self.partitions = planned.config.partitions
        self._world = planned.groups[0]
        self.messages = StageMessages(self._world, planned.config.microbatches, waits)
        self._compared = 0  # steps so far
        self._regularised = planned.regularised()
        self._shapes: dict[Any, tuple[dict[int, tf.TensorSpec], bool]] = {}
        trained, holders = planned.model.trainable_variables, planned.holders
        self.held = [v for v in trained if self.partition in holders[id(v)]]
        self.shared = [v for v in trained if len(holders[id(v)]) > 1]
        with tf.init_scope():
            self._anchor = tf.Variable(0.0, name="stages")

    def anchor(self) -> tf.Tensor:
        """A number that every tape watches: what the model computes is differentiated by all
        processes or by none, whatever variables their stages have."""
        return tf.convert_to_tensor(self._anchor)

    def graph(self, inputs: Any, training: bool) -> Graph:
        """The model's graph in one mode, traced again for inputs of other shapes than those before;
        stages stay as they are."""
        graph = self.planned.graph(training)
        known = [graph.tensors[i].shape[1:] for i in graph.inputs]
        if known != [tuple(x.shape)[1:] for x in keras.tree.flatten(inputs)]:
            specs = keras.tree.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
            with tf.init_scope():
                self.planned.trace_for(specs)
        return self.planned.graph(training)

    def stage(self, training: bool) -> StageGraph:
        """The stage in one mode."""
        return self.planned.stages(training)[self.partition]

    @property
    def is_last(self) -> bool:
        """True if outputs are computed here."""
        return self.planned.is_last

    def begin(self) -> None:
        """Start a step, in which the order of messages is kept.

        Raises:
            WorldError: when it runs, if a step before it ended in the middle.
        """
        self.messages.order = InOrder()
        self.messages.run(self.start_step, [], [])

    def start_step(self) -> None:
        """Note that a step has begun, of which `end_step` is the end.

        Raises:
            WorldError: a step before it ended in the middle.
        """
        self.messages.failure = None
        if self._world in _unfinished:
            raise WorldError(
                f"a step of {self.planned.model.name!r} ended in the middle, with an error that "
                "was caught: messages of its microbatches are still under way, and another step "
                "would take them for its own. End the script, and resume from a checkpoint"
            )
        if self._world.size > 1:
            _unfinished.add(self._world)

    def end_step(self) -> None:
        """Wait until what was sent has left, at the end of a step."""
        self.messages.wait()
        _unfinished.discard(self._world)

    def compare(self, tensors: Sequence[tf.Tensor]) -> None:
        """Compare the arguments of the first steps between the stages, which must all have the same
        batch: one reads its inputs, another its targets.

        Raises:
            DivergenceError: on every stage, when it runs, if they differ.
        """
        self.messages.run(self._compare, tensors, [])

    def _compare(self, *arrays: np.ndarray) -> None:
        if self._world.size == 1 or self._compared == _COMPARED_STEPS:
            return
        self._compared += 1
        digest = 0
        for array in arrays:
            digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), digest)
        every = self._world.allgather(digest, "comparison of the batch of a step")
        if len(set(every)) > 1:
            raise DivergenceError(
                "the stages of a model were given different batches. All ranks of a replica must "
                "read the same data in the same order: give shuffles a seed, and shard by "
                "smp.dp_rank(), not by smp.rank()"
            )

    def finish(self) -> None:
        """End a step that `begin` began."""
        self.messages.run(self.end_step, [], [])

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        training: bool,
        watched: bool = False,
        count: Callable[[Any], Any] | None = None,
    ) -> ForwardPass:
        """Run the stage on its part of a microbatch; send what the next one needs.

        Args:
            inputs: nested tensors of the microbatch.
            watched: the inputs have a gradient.
            count: makes of a loss that a layer has added, or of a regularisation loss, the number
                that counts; None: numbers count as they are, and vectors are refused.
        """
        stage = self.stage(training)
        specs, adds = self._specs(inputs, training)
        flat = keras.tree.flatten(inputs)
        tensors = dict(zip(stage.graph.inputs, flat, strict=True))
        scalar = [tf.TensorSpec([], keras.config.floatx())] * adds
        wanted = [*(specs[i] for i in stage.receives), *scalar]
        got = self.messages.receive("activation", self.partition - 1, microbatch, wanted)
        before = got.pop() if adds and got else tf.zeros([], keras.config.floatx())
        tensors.update(zip(stage.receives, got, strict=True))
        received = [x for x in got if is_differentiable(x)]
        given = [x for x in flat if is_differentiable(x)] if watched else []
        # Persistent: two losses may depend on the same outputs.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            for source in (*received, *given, *(v.value for v in stage.trainable)):
                tape.watch(source)
            with _assigning_no_weight(stage):
                run_nodes(stage.nodes, tensors)
            added = self._added(stage, count) if adds else None
        ids = stage.graph.needed_at_the_end if stage.is_last else stage.sends
        sent = [tf.convert_to_tensor(tensors[i]) for i in ids]
        targets = [x for x in sent if is_differentiable(x)]
        total = [] if added is None else [before + added]
        self._hand_on(stage, microbatch, [*sent, *total])
        ends = [specs[i] for i in stage.graph.needed_at_the_end]
        made = [*sent, *total] if stage.is_last else []
        return ForwardPass(stage, tape, given, received, targets, added, made, [*ends, *scalar])

    def _hand_on(self, stage: StageGraph, microbatch: int, tensors: Sequence[Any]) -> None:
        if not stage.is_last:
            self.messages.send("activation", [self.partition + 1], microbatch, tensors)
        else:
            self.messages.send("outputs", range(self.partitions - 1), microbatch, tensors)

    def outputs(self, microbatch: int, done: ForwardPass) -> list[Any]:
        """The model's outputs and their masks, flat as in `Graph.needed_at_the_end`, then the
        losses that all stages have added, if there are any; on every stage."""
        if self.is_last:
            return done.made
        return self.messages.receive("outputs", self.partitions - 1, microbatch, done.specs)

    def backward(
        self, microbatch: int, done: ForwardPass, of_outputs: Sequence[Any], of_added: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of `held`, and of the inputs; None where there is none.

        Args:
            of_outputs: gradients of the outputs that have one, by the same loss on every stage.
            of_added: that of the losses that layers have added.
        """
        targets, cotangents = list(done.targets), list(of_outputs)
        if not self.is_last:
            specs = [tf.TensorSpec(x.shape, x.dtype) for x in targets]
            cotangents = self.messages.receive("gradient", self.partition + 1, microbatch, specs)
        if done.added is not None:
            targets, cotangents = [*targets, done.added], [*cotangents, of_added]
        here = done.stage.trainable
        # By their handles: this is no gradient of the step's loss, which `keras_patches` scale.
        sources = [*done.received, *done.inputs, *(v.value.handle for v in here)]
        found = done.tape.gradient(targets, sources, output_gradients=cotangents)
        of_received = found[: len(done.received)]
        of_inputs = found[len(done.received) :][: len(done.inputs)]
        if self.partition:
            pairs = zip(done.received, of_received, strict=True)
            sent = [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in pairs]
            self.messages.send("gradient", [self.partition - 1], microbatch, sent)
        # None: the outputs do not depend on it, so that an optimizer leaves it alone.
        of = {id(v): g for v, g in zip(here, found[-len(here) :] if here else [], strict=True)}
        return [of.get(id(v)) for v in self.held], of_inputs

    def _added(self, stage: StageGraph, count: Callable[[Any], Any] | None) -> Any:
        """The sum of the losses that this stage's layers and variables have added."""
        layers = {id(n.operation): n.operation for n in stage.nodes if n.is_layer}
        inner = {id(x): x for layer in layers.values() for x in layer._flatten_layers()}
        losses = [loss for layer in inner.values() for loss in layer._get_own_losses()]
        variables = self._regularised.get(self.partition, ())
        losses += [keras.ops.sum(v.regularizer(v)) for v in variables]
        if count is None and any(x.shape.rank != 0 for x in losses):
            raise ModelError(
                f"a layer of {self.planned.model.name!r} has added a loss for each example "
                "(add_loss), of which a step sees one microbatch: add their mean"
            )
        floats = keras.config.floatx()
        counted = [keras.ops.cast(x if count is None else count(x), floats) for x in losses]
        return tf.add_n(counted) if counted else tf.zeros([], floats)

    # -- shapes

    def _specs(self, inputs: Any, training: bool) -> tuple[dict[int, tf.TensorSpec], bool]:
        """Shapes and types of all tensors of the graph, for inputs of these shapes; and whether
        layers or weights add losses."""
        flat = keras.tree.flatten(inputs)
        key = (training, *((tuple(x.shape), x.dtype) for x in flat))
        if key not in self._shapes:
            with tf.init_scope():
                self._shapes[key] = self._infer(flat, training)
        return self._shapes[key]

    def _infer(self, flat: Sequence[Any], training: bool) -> tuple[dict[int, tf.TensorSpec], bool]:
        graph = self.planned.graph(training)
        found: dict[int, tf.TensorSpec] = {}

        def compute(*values: Any) -> Any:
            tensors = dict(zip(graph.inputs, values, strict=True))
            run_nodes(graph.nodes, tensors)
            found.update({i: tf.TensorSpec(x.shape, x.dtype) for i, x in tensors.items()})
            return [tensors[i] for i in graph.outputs]

        symbolic = [keras.KerasTensor(x.shape, backend.standardize_dtype(x.dtype)) for x in flat]
        with losses_collected(graph.nodes) as scope, zeros_if_remote():
            backend.compute_output_spec(compute, *symbolic)
        return found, bool(scope.losses) or bool(self._regularised)


@contextmanager
def _assigning_no_weight(stage: StageGraph) -> Iterator[None]:
    """Refuse layers that assign trained weights inside the block, once for each microbatch.

    Raises:
        ModelError: naming one.
    """
    step = current_step()
    before = set(step.assigned) if step is not None else set()
    yield
    for weight in stage.trainable:
        if step is not None and id(weight) in step.assigned.keys() - before:
            raise ModelError(explain_assigned_weight(f"the layer of {weight.path}"))
