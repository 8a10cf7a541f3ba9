"""A model cut into stages, and this process's partition of it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.graph.nodes import Graph, Tensor
from ktrainer.backends.pipeline.graph.trace import trace, trace_open
from ktrainer.backends.pipeline.partition.costs import node_costs, state_factor
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph
from ktrainer.backends.pipeline.placement.deferred_variables import deferred
from ktrainer.backends.pipeline.placement.variable_holders import (
    build_optimizer,
    holders_of,
    optimizer_of,
    place_model,
)
from ktrainer.backends.pipeline.planning import StagePlan, plan_stages
from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.backends.pipeline.stage.microbatches import leaves, with_leaves
from ktrainer.config import PipelineConfig
from ktrainer.distributed import World
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import DataError, ModelError
from ktrainer.steps.loss_scope import explain_coupled_call
from ktrainer.steps.remote_variable import zeros_if_remote
from ktrainer.steps.step_helpers import global_seed, has_own_steps
from ktrainer.steps.variable_placement import Placement

PLANNED = "_ktrainer_planned"  # attribute of a model that was cut: its `PlannedModel`


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
        verifies: warn of a sum over the batch in the graph of a model without weights.

    Attributes:
        partition: this process's.
        placement: which process holds which variables; set by `place`.
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
        verifies: bool = True,
    ) -> None:
        self._verifies = verifies
        self.model, self.config = model, config
        self.layout, self.world, self.groups = layout, world, groups
        self.partition = layout.partition_of(world.rank)
        self._batch, self._accumulate = max(1, batch // config.microbatches), accumulate
        self._graphs: dict[bool, Graph] = {}
        self._stages: dict[bool, tuple[StageGraph, ...]] = {}
        self.sums = GradientAccumulators()
        self.by_shape = False

    @property
    def placed(self) -> bool:
        """True if the model has been cut."""
        return bool(self._stages)

    def graph(self, training: bool) -> Graph:
        """The whole model's graph, for training or for inference."""
        return self._graphs[training]

    def stages(self, training: bool) -> tuple[StageGraph, ...]:
        """All stages of that graph."""
        return self._stages[training]

    @property
    def in_full_precision(self) -> bool:
        """True if no layer computes in 16 bits."""
        dtypes = {layer.compute_dtype for layer in self.model._flatten_layers()}
        dtypes |= {tensor.dtype for tensor in self.graph(True).tensors}
        return not dtypes & {"float16", "bfloat16"}

    def as_cut(self, data: Any) -> Any:
        """Add or remove a last dimension of length 1 where the model was cut for inputs with it or
        without: as Keras' functional models do, and no others.

        Args:
            data: nested arrays or specs: x, or (x, y), or (x, y, sample_weight).

        Raises:
            DataError: there are more or fewer inputs, with other names, or other dimensions.
        """
        if not self.placed:
            return data
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        graph = self.graph(True)
        _check_names(graph, inputs)
        known = [graph.tensors[i] for i in graph.inputs]
        every = leaves(data)
        first, rest = every[: len(known)], every[len(known) :]
        if all(len(t.shape) == len(leaf.shape) for t, leaf in zip(known, first, strict=True)):
            return data
        # Sequential ones too; the `call` of a model's own gets the data as they are.
        adjusts = getattr(self.model, "inputs", None) is not None
        pairs = zip(known, first, strict=True)
        return with_leaves(data, [*(_with_dimensions_of(*each, adjusts) for each in pairs), *rest])

    def place(self, spec: Any) -> None:
        """Cut the model for data of this spec, and make the variables that are held here.

        Args:
            spec: nested `tf.TensorSpec` of a local batch.
        """
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
        if self.placed:
            self._trace_again(inputs)
            return
        model = self.model
        global_seed()  # else a trace would make it, without a value
        # Others are checked by `health.verify`, which computes with their weights.
        has_weights = model.built and all(v._value is not None for v in model.variables)
        with deferred():
            self.plan = self._plan_stages(inputs)
            slots = build_optimizer(model)
            inference = trace_open(model, inputs, training=False, like=self.plan.graph)
        if not has_weights:
            self._warn_of_coupling(self.plan.graph)
        self._cut(self.plan.graph, inference)
        given = [tuple(leaf.shape)[1:] for leaf in leaves(inputs)]
        for graph in (self.plan.graph, inference):
            self.by_shape |= [graph.tensors[i].shape[1:] for i in graph.inputs] != given
        self.compiled_for = (optimizer_of(model), tuple(model.trainable_variables))
        every = [*self._stages[True], *self._stages[False]]
        # A step of the model's own may read what its `call` does not.
        everywhere = has_own_steps(model)
        self.holders = holders_of(model, every, self.config.partitions, everywhere)
        gc.collect()  # traces are cyclic; frees memory for the weights
        self.placement = place_model(
            model, self.holders, slots, self.layout, self.groups, self.world.rank
        )

    def _plan_stages(self, inputs: Any) -> StagePlan:
        return plan_stages(
            self.model,
            inputs,
            self.config,
            microbatches=self.config.microbatches * self._accumulate,
            batch=self._batch,
            state_factor=state_factor(optimizer_of(self.model)),
            costs=self._profiled(inputs),
        )

    def _warn_of_coupling(self, graph: Graph) -> None:
        node = graph.coupling_node
        parts = self.config.microbatches * self.layout.replicas * self._accumulate
        if node is None or parts == 1 or not (self._verifies and self.world.is_root):
            return
        place = f"{node.name!r}" + (f" ({node.where})" if node.where else "")
        warnings.warn(explain_coupled_call(f"{parts} microbatches", place), stacklevel=2)

    @property
    def is_last(self) -> bool:
        """Whether this process has the last partition, where outputs are computed."""
        return self.partition == self.config.partitions - 1

    def check_unchanged(self) -> None:
        """Refuse a model that was compiled again, or of which other layers are frozen now.

        Raises:
            ModelError: its variables were placed for another optimizer, or other weights.
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
        """Trace for data with wider shapes; every node stays on its stage."""
        failed = False
        try:
            self.trace_for(inputs)
        except ModelError:
            # Most likely a dimension that differs must be known, as for positions counted in
            # `call`. Any other error is raised again for the shapes of a microbatch.
            failed = True
        # Agreed: stages that are traced for each shape exchange the shapes.
        self.by_shape |= self.groups[0].any(failed, "trace the model again")

    def trace_for(self, inputs: Any) -> None:
        """Trace the model for inputs of these shapes; every node stays on its stage."""
        # A trace updates no variable, and reads only shapes of other stages' variables.
        with keras.StatelessScope(initialize_variables=False), zeros_if_remote():
            training = trace(self.model, inputs, training=True)
            inference = trace(self.model, inputs, training=False, like=training)
        self._cut(training, inference)

    def _cut(self, training: Graph, inference: Graph) -> None:
        """Cut both graphs alike."""
        self._graphs = {True: training, False: inference}
        self._stages = {mode: self.plan.cut(graph) for mode, graph in self._graphs.items()}

    def regularised(self) -> dict[int, Sequence[Any]]:
        """Variables whose regularisation loss each stage counts: the first stage that reads it."""
        first = {id(v): 0 for v in self.model.trainable_variables}
        for stage in reversed(self._stages[True]):
            first.update({id(v): stage.index for v in stage.trainable})
        found: dict[int, list[Any]] = {}
        for variable in self.model.trainable_variables:
            if variable.regularizer is not None:
                found.setdefault(first[id(variable)], []).append(variable)
        return dict(found)

    def _profiled(self, inputs: Any) -> list[float] | None:
        """Costs measured by rank 0, on all ranks; None where costs are counted."""
        if self.config.costs != "profile":
            return None
        graph = trace_open(self.model, inputs, training=True)  # on all ranks: it names layers
        measured = None
        if self.world.is_root:
            measured = node_costs(graph, "profile", batch=self._batch)
        return self.world.broadcast(measured, 0, "measured costs of layers")


def _with_dimensions_of(known: Tensor, leaf: Any, adjusts: bool) -> Any:
    """Add or remove a last dimension of length 1, if the model does and that gives `known`'s.

    Raises:
        DataError: it does not.
    """
    shape = tuple(leaf.shape)
    more = len(known.shape) - len(shape)
    if not more:
        return leaf
    added, removed = more == 1 and known.shape[-1] == 1, more == -1 and shape[-1] == 1
    dense = not isinstance(leaf, (tf.SparseTensorSpec, tf.RaggedTensorSpec))
    if not (adjusts and dense and (added or removed)):
        raise DataError(
            f"input {known.name!r} has shape {shape}, but the model was cut into stages for "
            f"{known.shape}: give data with as many dimensions as the first"
        )
    if isinstance(leaf, tf.TensorSpec):
        return tf.TensorSpec((*shape, 1)[: len(known.shape)], leaf.dtype)
    return leaf[..., None] if more > 0 else leaf[..., 0]


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
