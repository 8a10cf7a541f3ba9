"""A model cut into stages, and this process's part of it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import keras

from ktrainer.backends.pipeline.costs import node_costs
from ktrainer.backends.pipeline.cut import StageGraph
from ktrainer.backends.pipeline.deferred import deferred
from ktrainer.backends.pipeline.graph import trace, trace_open
from ktrainer.backends.pipeline.microbatches import leaves
from ktrainer.backends.pipeline.nodes import Graph
from ktrainer.backends.pipeline.optimizer_memory import state_factor
from ktrainer.backends.pipeline.placing import (
    build_optimizer,
    holders_of,
    optimizer_of,
    place_model,
)
from ktrainer.backends.pipeline.planning import StagePlan, plan_stages
from ktrainer.backends.pipeline.sums import GradientSums
from ktrainer.config import PipelineConfig
from ktrainer.errors import DataError, ModelError
from ktrainer.steps.elsewhere import zeros_elsewhere
from ktrainer.steps.placement import Placement
from ktrainer.world import World
from ktrainer.world.layout import Layout


class PlannedModel:
    """Cuts a model into stages and keeps this process's variables.

    Args:
        model: a compiled Keras model, whose variables may have no values yet.
        config: the pipeline's keys.
        batch: examples in a batch of one replica, as far as known, to weigh layers by.
        accumulate: batches of an update, which go through in one schedule.
        layout: which rank has which partition.
        world: all ranks.
        groups: the processes of this replica, and those of this partition.

    Attributes:
        partition: this process's.
        placement: who holds what; set by `place`.
        holders: the partitions that hold each variable, by `id()`; set by `place`.
        plan: the stages and their costs; set by `place`.
        compiled_for: the optimizer and the trained variables then.
        sums: where gradients are added up.
        by_shape: whether microbatches of each shape need a graph of their own.
    """

    placement: Placement
    holders: dict[int, list[int]]
    plan: StagePlan
    compiled_for: tuple[Any, tuple[Any, ...]]

    def __init__(
        self,
        model: keras.Model,
        config: PipelineConfig,
        batch: int,
        accumulate: int,
        layout: Layout,
        world: World,
        groups: tuple[World, World],
    ) -> None:
        self.model, self.config = model, config
        self.layout, self.world, self.groups = layout, world, groups
        self.partition = layout.partition_of(world.rank)
        self._batch, self._accumulate = max(1, batch // config.microbatches), accumulate
        self._graphs: dict[bool, Graph] = {}
        self._stages: dict[bool, tuple[StageGraph, ...]] = {}
        self.sums = GradientSums()
        self.by_shape = False

    @property
    def placed(self) -> bool:
        """Whether the model has been cut."""
        return bool(self._stages)

    def graph(self, training: bool) -> Graph:
        """The whole model's graph, for training or for inference."""
        return self._graphs[training]

    def stages(self, training: bool) -> tuple[StageGraph, ...]:
        """All stages of that graph."""
        return self._stages[training]

    @property
    def in_full_precision(self) -> bool:
        """Whether no layer computes in 16 bits."""
        dtypes = {layer.compute_dtype for layer in self.model._flatten_layers()}
        dtypes |= {tensor.dtype for tensor in self.graph(True).tensors}
        return not dtypes & {"float16", "bfloat16"}

    def check_inputs(self, spec: Any) -> None:
        """Refuse inputs of another kind than the model was cut for.

        Args:
            spec: as of `place`.

        Raises:
            DataError: there are more or fewer of them, with other names, or of another rank.
        """
        if self.placed:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
            graph = self.graph(True)
            _check_names(graph, inputs)
            for i, leaf in zip(graph.inputs, leaves(inputs), strict=True):
                known, given = graph.tensors[i].shape, tuple(leaf.shape)
                if len(known) != len(given):
                    raise DataError(
                        f"input {graph.tensors[i].name!r} has shape {given}, but the model was cut "
                        f"into stages for {known}, and keeps them: give it as many dimensions as "
                        "the data that it saw first"
                    )

    def place(self, spec: Any) -> None:
        """Cut the model for data of this spec, and make the variables that are held here.

        Args:
            spec: nested `tf.TensorSpec` of a share.
        """
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
        if self.placed:
            self._trace_again(inputs)
            return
        config, model = self.config, self.model
        with deferred():
            self.plan = plan_stages(
                model,
                inputs,
                config,
                microbatches=config.microbatches * self._accumulate,
                batch=self._batch,
                state_factor=state_factor(optimizer_of(model)),
                costs=self._profiled(inputs),
            )
            slots = build_optimizer(model)
            inference = trace_open(model, inputs, training=False)
        self._cut(self.plan.graph, inference)
        given = [tuple(leaf.shape)[1:] for leaf in leaves(inputs)]
        for graph in (self.plan.graph, inference):
            self.by_shape |= [graph.tensors[i].shape[1:] for i in graph.inputs] != given
        self.compiled_for = (optimizer_of(model), tuple(model.trainable_variables))
        every = [*self._stages[True], *self._stages[False]]
        self.holders = holders_of(model, every, config.partitions)
        gc.collect()  # traces are cyclic; what they took, the weights can use
        self.placement = place_model(
            model, self.holders, slots, self.layout, self.groups, self.world.rank
        )

    def check_unchanged(self) -> None:
        """Refuse a model that was compiled again, or of which other layers are frozen now.

        Raises:
            ModelError: who holds what was decided for another optimizer, or other weights.
        """
        if not self.placed:
            return
        optimizer, trained = self.compiled_for
        now = self.model.trainable_variables
        same = len(now) == len(trained) and all(a is b for a, b in zip(now, trained, strict=True))
        if optimizer is not optimizer_of(self.model) or not same:
            raise ModelError(
                f"model {self.model.name!r} was compiled again, or layers were frozen or unfrozen, "
                "after it was cut into stages. Save it with trainer.save and pass fit a function "
                "that loads and compiles it"
            )

    def _trace_again(self, inputs: Any) -> None:
        """For data with wider shapes; every node stays on its stage."""
        failed = False
        try:
            self.trace_for(inputs)
        except ModelError:
            # Most likely a dimension that differs must be known, as for positions counted in
            # `call`. Whatever else it is, the shapes of a microbatch show it again.
            failed = True
        # Together: stages that are traced for each shape tell one another the shapes.
        self.by_shape |= self.groups[0].any(failed, "trace the model again")

    def trace_for(self, inputs: Any) -> None:
        """Take the graph of inputs of these shapes; every node stays on its stage."""
        # Nothing is moved by a trace, and other stages' variables are only looked at.
        with keras.StatelessScope(initialize_variables=False), zeros_elsewhere():
            training = trace(self.model, inputs, training=True)
            inference = trace(self.model, inputs, training=False)
        self._cut(training, inference)

    def _cut(self, training: Graph, inference: Graph) -> None:
        """Cut both graphs alike."""
        self._graphs = {True: training, False: inference}
        self._stages = {mode: self.plan.cut(graph) for mode, graph in self._graphs.items()}

    def regularised(self) -> dict[int, Sequence[Any]]:
        """For each stage, the variables whose regularisation loss it counts: each variable is
        counted by the first stage that reads it."""
        first = {id(v): 0 for v in self.model.trainable_variables}
        for stage in reversed(self._stages[True]):
            first.update({id(v): stage.index for v in stage.trainable})
        found: dict[int, list[Any]] = {}
        for variable in self.model.trainable_variables:
            if variable.regularizer is not None:
                found.setdefault(first[id(variable)], []).append(variable)
        return dict(found)

    def _profiled(self, inputs: Any) -> list[float] | None:
        """Measured costs, those of rank 0 on all ranks; None where costs are counted."""
        if self.config.costs != "profile":
            return None
        graph = trace_open(self.model, inputs, training=True)  # on all ranks: it makes names
        measured = None
        if self.world.is_root:
            measured = node_costs(graph, "profile", batch=self._batch)
        return self.world.broadcast(measured, 0, "measured costs of layers")


def _check_names(graph: Graph, inputs: Any) -> None:
    """Compare the number of inputs, and their names where both are dicts."""
    known = [graph.tensors[i].name for i in graph.inputs]
    count = len(leaves(inputs))
    if isinstance(inputs, dict) and isinstance(graph.input_structure, dict):
        same = inputs.keys() == graph.input_structure.keys()
        known, given = list(graph.input_structure), ", ".join(map(str, inputs))
    else:
        same, given = True, str(count)
    if count != len(graph.inputs) or not same:
        raise DataError(
            f"the model was cut into stages for {len(graph.inputs)} inputs ({', '.join(known)}), "
            f"and keeps them, but was given {given}: give it the same inputs"
        )
