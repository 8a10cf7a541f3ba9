"""This process's stage of a cut model: forward and backward passes, and its messages.

Eagerly each action runs at once. Inside of a `tf.function` it is recorded, and messages are
`tf.py_function`s, each of which waits for the one before: they run in the order of the schedule.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from ktrainer.backends.pipeline.graph.nodes import run_nodes
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph, is_differentiable
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.backends.pipeline.schedules.transfers import Transfer
from ktrainer.distributed import World
from ktrainer.errors import DivergenceError, ModelError, WorldError
from ktrainer.steps.remote_variable import zeros_if_remote

_unfinished: WeakSet[World] = WeakSet()  # stages of which a step has begun, and not ended


_COMPARED_STEPS = 3


class StageRunner:
    """Runs the stage that this process holds.

    Args:
        planned: the model, cut and placed.
    """

    def __init__(self, planned: PlannedModel) -> None:
        self.planned, self.partition = planned, planned.partition
        self.partitions = planned.config.partitions
        self._world = planned.groups[0]
        self._transport = Transport(
            self._world, self.partitions, channels=planned.config.microbatches
        )
        self._compared = 0  # steps so far
        self._shapes: dict[Any, dict[int, tf.TensorSpec]] = {}
        self._last: Any = None  # the message before, inside of a tf.function
        self.held = list(self.stage(True).trainable)

    def stage(self, training: bool) -> StageGraph:
        """The stage in one mode."""
        return self.planned.stages(training)[self.partition]

    @property
    def is_last(self) -> bool:
        """True if outputs are computed here."""
        return self.partition == self.partitions - 1

    def begin(self) -> None:
        """Start a step, in which the order of messages is kept.

        Raises:
            WorldError: when it runs, if a step before it ended in the middle.
        """
        self._last = None
        self._message(self._start, [], [])

    def _start(self) -> None:
        if self._world in _unfinished:
            raise WorldError(
                f"a step of {self.planned.model.name!r} ended in the middle, with an error that "
                "was caught: messages of its microbatches are still under way, and another step "
                "would take them for its own. End the script, and resume from a checkpoint"
            )
        if self._world.size > 1:
            _unfinished.add(self._world)

    def _end(self) -> None:
        self._transport.finish()
        _unfinished.discard(self._world)

    def compare(self, tensors: Sequence[tf.Tensor]) -> None:
        """Compare the arguments of the first steps between the stages, which must all have the same
        batch: one reads its inputs, another its targets.

        Raises:
            DivergenceError: on every stage, when it runs, if they differ.
        """
        self._message(self._compare, tensors, [])

    def _compare(self, *tensors: Any) -> None:
        if self._world.size == 1 or self._compared == _COMPARED_STEPS:
            return
        self._compared += 1
        digest = 0
        for tensor in tensors:
            digest = zlib.crc32(np.ascontiguousarray(tensor.numpy()).tobytes(), digest)
        every = self._world.allgather(digest, "comparison of the batch of a step")
        if len(set(every)) > 1:
            raise DivergenceError(
                "the stages of a model were given different batches. All ranks of a replica must "
                "read the same data in the same order: give shuffles a seed, and shard by "
                "smp.dp_rank(), not by smp.rank()"
            )

    def finish(self) -> None:
        """Wait until what was sent has left."""
        self._message(self._end, [], [])

    def forward(self, microbatch: int, inputs: Any, training: bool) -> _Pass:
        """Run the stage on its part of a microbatch; send what the next one needs."""
        stage, specs = self.stage(training), self._specs(inputs, training)
        flat = keras.tree.flatten(inputs)
        tensors = dict(zip(stage.graph.inputs, flat, strict=True))
        received = self._receive("activation", -1, microbatch, [specs[i] for i in stage.receives])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for tensor in received:
                if is_differentiable(tensor):
                    tape.watch(tensor)
            for variable in stage.trainable:
                tape.watch(variable.value)
            tensors.update(zip(stage.receives, received, strict=True))
            run_nodes(stage.nodes, tensors)
        ids = stage.graph.outputs if stage.is_last else stage.sends
        sent = [tf.convert_to_tensor(tensors[i]) for i in ids]
        if not stage.is_last:
            self._send("activation", 1, microbatch, sent)
        elif self.partitions > 1:
            self._send_outputs(microbatch, sent)
        return _Pass(tape, received, sent, [specs[i] for i in stage.graph.outputs], stage)

    def outputs(self, microbatch: int, done: _Pass) -> Any:
        """The model's outputs, structured as it returns them; on every stage."""
        flat = done.sent if self.is_last else self._receive_outputs(microbatch, done.outputs)
        graph = done.stage.graph
        values = dict(zip(graph.outputs, flat, strict=True))
        return keras.tree.map_structure(lambda ref: values[ref.id], graph.output_structure)

    def backward(self, microbatch: int, done: _Pass, of_outputs: Sequence[Any]) -> list[Any]:
        """Gradients of the variables that are held here; None where there is none.

        Args:
            of_outputs: gradients of the outputs that have one, by the same loss on every stage.
        """
        targets = [x for x in done.sent if is_differentiable(x)]
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in targets]
        cotangents = list(of_outputs)
        if not self.is_last:
            cotangents = self._receive("gradient", 1, microbatch, specs)
        sources = [x for x in done.received if is_differentiable(x)]
        variables = [v.value for v in done.stage.trainable]
        found = done.tape.gradient(targets, [*sources, *variables], output_gradients=cotangents)
        of_inputs, of_variables = found[: len(sources)], found[len(sources) :]
        if self.partition:
            pairs = zip(sources, of_inputs, strict=True)
            sent = [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in pairs]
            self._send("gradient", -1, microbatch, sent)
        # None: the outputs do not depend on it, so that an optimizer leaves it alone.
        return [None if g is None else tf.convert_to_tensor(g) for g in of_variables]

    # -- messages

    def _send(self, kind: Any, step: int, microbatch: int, tensors: Sequence[Any]) -> None:
        transfer = Transfer(kind, self.partition, self.partition + step, microbatch)
        self._message(lambda *values: self._transport.send(transfer, values), tensors, [])

    def _receive(self, kind: Any, step: int, microbatch: int, specs: Sequence[Any]) -> list[Any]:
        if not 0 <= self.partition + step < self.partitions or not specs:
            return []
        transfer = Transfer(kind, self.partition + step, self.partition, microbatch)
        return self._message(lambda: self._transport.receive(transfer, specs), [], specs)

    def _send_outputs(self, microbatch: int, tensors: Sequence[Any]) -> None:
        def send(*values: Any) -> None:
            what = f"outputs of microbatch {microbatch}"
            for value in values:
                array = np.ascontiguousarray(value.numpy())
                for partition in range(self.partitions - 1):
                    self._transport.send_array(array, partition, microbatch, what)

        self._message(send, tensors, [])

    def _receive_outputs(self, microbatch: int, specs: Sequence[Any]) -> list[Any]:
        def receive() -> list[Any]:
            last = self.partitions - 1
            what = (
                f"outputs of microbatch {microbatch} from {self._transport.rank_name(last)}, "
                "the last stage"
            )
            arrays = [np.empty(tuple(s.shape), s.dtype.as_numpy_dtype) for s in specs]
            for array in arrays:
                self._transport.wait(self._transport.start_receive(array, last, microbatch), what)
            return [tf.convert_to_tensor(array) for array in arrays]

        return self._message(receive, [], specs)

    def _message(
        self, function: Callable[..., Any], inputs: Sequence[Any], specs: Sequence[Any]
    ) -> list[Any]:
        """Send or receive, after the messages before."""
        if tf.executing_eagerly():
            return list(function(*inputs) or [])

        def call(*values: Any) -> Any:
            return [*(function(*values) or []), tf.constant(0)]

        with tf.control_dependencies([] if self._last is None else [self._last]):
            made = tf.py_function(call, list(inputs), [*(s.dtype for s in specs), tf.int32])
        *results, self._last = made
        for result, spec in zip(results, specs, strict=True):
            result.set_shape(spec.shape)
        return list(results)

    # -- shapes

    def _specs(self, inputs: Any, training: bool) -> dict[int, tf.TensorSpec]:
        """Shapes and types of all tensors of the graph, for inputs of these shapes."""
        flat = keras.tree.flatten(inputs)
        key = (training, *((tuple(x.shape), x.dtype) for x in flat))
        if key not in self._shapes:
            with tf.init_scope():
                self._shapes[key] = self._infer(flat, training)
        return self._shapes[key]

    def _infer(self, flat: Sequence[Any], training: bool) -> dict[int, tf.TensorSpec]:
        graph = self.planned.graph(training)
        found: dict[int, tf.TensorSpec] = {}

        def compute(*values: Any) -> Any:
            tensors = dict(zip(graph.inputs, values, strict=True))
            run_nodes(graph.nodes, tensors)
            found.update({i: tf.TensorSpec(x.shape, x.dtype) for i, x in tensors.items()})
            return [tensors[i] for i in graph.outputs]

        symbolic = [keras.KerasTensor(x.shape, backend.standardize_dtype(x.dtype)) for x in flat]
        with keras.StatelessScope(initialize_variables=False), zeros_if_remote():
            backend.compute_output_spec(compute, *symbolic)
        for i, spec in found.items():
            sent = any(i in (*s.sends, *graph.outputs) for s in self.planned.stages(training))
            if sent and not spec.shape.is_fully_defined():
                raise ModelError(
                    f"{graph.tensors[i].name!r} goes from stage to stage, and has shape "
                    f"{spec.shape}: it must be known before it is computed. Give batches of one "
                    "size (drop_remainder=True), and keep layers whose outputs have a size known "
                    "only once they are computed on one stage"
                )
        return found


class _Pass:
    """A forward pass, kept for the backward pass of the same microbatch."""

    def __init__(
        self, tape: Any, received: list[Any], sent: list[Any], outputs: list[Any], stage: StageGraph
    ) -> None:
        self.tape, self.received, self.sent = tape, received, sent
        self.outputs, self.stage = outputs, stage
