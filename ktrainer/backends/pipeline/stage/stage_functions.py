"""Functions of a traced stage: forward, backward, and backward in halves.

Between forward and backward a stage saves what backward needs: some of its arguments, and tensors
of its forward pass. Tensors that depend on the weights alone, such as a cast to another type, are
recomputed rather than saved for every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.backends.pipeline.stage.gradient_ordering import GradientOrdering
from ktrainer.backends.pipeline.stage.subgraphs import TracedGraph
from ktrainer.errors import ModelError


@dataclass(frozen=True)
class Gradients:
    """Symbolic gradients in a traced graph.

    Attributes:
        of_inputs: of what was received; dense.
        of_variables: (variable, its gradient), a tensor, slices or None.
        cotangents: the placeholders for the gradients of what was sent.
        seed: where the backward pass of the loss begins, on the last stage.
    """

    of_inputs: list[tf.Tensor]
    of_variables: list[tuple[Any, Any]]
    cotangents: list[tf.Tensor]
    seed: tf.Tensor

    def pruned(self, traced: TracedGraph, sent: Sequence[bool]) -> tuple[Gradients, list[bool]]:
        """Prune the variables on which the loss does not depend.

        Args:
            sent: for each of `cotangents`, whether the loss depends on what was sent.

        Returns:
            The gradients, and for each of `of_inputs` whether the loss depends on that.
        """
        starts = [t for t, matters in zip(self.cotangents, sent, strict=True) if matters]
        reached = traced.descendants_of([*starts, self.seed])

        def matters(gradient: Any) -> bool:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            return values is not None and values.op.name in reached

        of_variables = [(v, g if matters(g) else None) for v, g in self.of_variables]
        return replace(self, of_variables=of_variables), [matters(g) for g in self.of_inputs]

    @property
    def dense(self) -> list[Any]:
        """The variables with dense gradients."""
        return [v for v, g in self.of_variables if isinstance(g, tf.Tensor)]

    @property
    def sparse(self) -> list[Any]:
        """The variables whose gradients are slices."""
        return [v for v, g in self.of_variables if isinstance(g, tf.IndexedSlices)]

    @property
    def weights(self) -> list[tf.Tensor]:
        """The gradients of variables, flat: values and indices of slices."""
        flat: list[tf.Tensor] = []
        for _, gradient in self.of_variables:
            if isinstance(gradient, tf.IndexedSlices):
                flat += [gradient.values, gradient.indices]
            elif gradient is not None:
                flat.append(gradient)
        return flat


@dataclass
class SavedTensors:
    """Tensors of a microbatch that a stage saves in forward for its backward pass."""

    arguments: list[Any]
    saved: list[Any]
    more: list[Any] = field(default_factory=list)
    complete: bool = True


def _refuse_generators(traced: TracedGraph, again: list[tf.Tensor]) -> None:
    """Refuse to recompute what would draw other numbers from a generator than before.

    `tf.random` functions draw the same: each op counts its draws, in the order of the microbatches.
    """
    if drawing := traced.drawing_from_generators(traced.needed_for(again)):
        raise ModelError(
            f"{drawing[0]!r} draws from a tf.random.Generator, which would give other numbers when "
            "backend.recompute=true runs the stage forward again for its gradient. Draw with "
            "keras.random and a keras.random.SeedGenerator that is an attribute of the layer, or "
            "set backend.recompute=false."
        )


class StageFunctions:
    """The compiled functions of one stage.

    Args:
        traced: the graph of its forward and backward pass.
        arguments: placeholders of its arguments, flat.
        weights: how many of them, the first ones, are weights.
        made: what its forward pass gives.
        gradients: what its backward pass gives; None for a stage that only runs forward.
        sums: where gradients of variables are added up.
        recompute: keep the arguments only, and run forward again before backward.
        xla: compile with XLA.
    """

    def __init__(
        self,
        traced: TracedGraph,
        arguments: list[tf.Tensor],
        weights: int,
        made: list[tf.Tensor],
        gradients: Gradients | None,
        sums: GradientAccumulators,
        recompute: bool = False,
        xla: bool = False,
    ) -> None:
        self._traced, self._arguments, self._made = traced, arguments, made
        self._sums, self._recompute, self._xla = sums, recompute, xla
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._keep: list[int] = []
        self._python: list[str] = []  # ops that run gradients of Python functions
        saved: list[tf.Tensor] = []
        if gradients is not None:
            self._gradients = gradients
            for variable in gradients.dense:
                sums.of(variable)
            saved = self._find_kept(gradients, weights)
        fetched = made if recompute else [*made, *saved]
        self._forward = traced.function(arguments, fetched, xla=xla)
        if recompute and gradients is not None:
            again = [*saved, *self._python_outputs()]
            _refuse_generators(traced, again)
            self._recompute_forward = traced.function(arguments, again, xla=xla)

    @property
    def python_gradient(self) -> str | None:
        """Name of an op that needs the tape of the last forward pass, or None."""
        return self._python[0] if self._python and not self._recompute else None

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], SavedTensors]:
        """Run forward; return its results, and the tensors to save."""
        results = self._forward(*values)
        count = len(self._made)
        if self._recompute:
            return list(results), SavedTensors(list(values), [], complete=False)
        return list(results[:count]), SavedTensors([values[k] for k in self._keep], results[count:])

    def backward(
        self, kept: SavedTensors, cotangents: Sequence[Any], counts: bool
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of inputs, and slices; dense gradients of variables are added up.

        Args:
            counts: False for padding, whose gradients are ignored and taken as 0.
        """
        self._complete(kept)
        gradients = self._gradients
        weights, inputs = gradients.weights, gradients.of_inputs
        if not weights and not inputs:
            return [], []

        def finish(made: list[Any], first: bool) -> Any:
            return self._add_up(made[: len(weights)], first, counts), made[len(weights) :]

        name = f"backward, {counts}"
        function = self._adding(name, self._feeds, [*weights, *inputs], finish, self._ran)
        slices, made = function(*kept.arguments, *kept.saved, *cotangents)
        return list(made), list(slices)

    def input_gradient(self, kept: SavedTensors, cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of inputs; `weight_gradient` does the rest later."""
        self._complete(kept)
        kept.more = list(cotangents)
        inputs = self._gradients.of_inputs
        if not inputs and not self._handed_on:
            return []
        if "input" not in self._functions:
            self._functions["input"] = self._traced.function(
                self._feeds, [*inputs, *self._handed_on], xla=self._xla, done=self._ran
            )
        made = self._functions["input"](*kept.arguments, *kept.saved, *cotangents)
        kept.more += made[len(inputs) :]
        return list(made[: len(inputs)])

    def weight_gradient(self, kept: SavedTensors, counts: bool) -> list[Any]:
        """Add up the dense gradients of variables; returns slices."""
        weights = self._gradients.weights
        if not weights:
            return []
        feeds = [*self._feeds, *self._handed_on]
        done = {*self._ran, *self._first}

        def finish(made: list[Any], first: bool) -> list[Any]:
            return self._add_up(made, first, counts)

        function = self._adding(f"weight, {counts}", feeds, weights, finish, done)
        return list(function(*kept.arguments, *kept.saved, *kept.more))

    def _complete(self, kept: SavedTensors) -> None:
        """Run forward again if only the arguments were saved."""
        if not kept.complete:
            kept.saved = list(self._recompute_forward(*kept.arguments))[: self._saved]
            kept.arguments = [kept.arguments[k] for k in self._keep]
            kept.complete = True

    def _find_kept(self, gradients: Gradients, weights: int) -> list[tf.Tensor]:
        """Choose what backward gets: arguments, by number, and tensors of forward."""
        traced = self._traced
        self._ran = traced.needed_for(self._made)
        wanted = [*gradients.of_inputs, *gradients.weights]
        known = [*self._arguments, *gradients.cotangents]
        backward = traced.needed_for(wanted, done=self._ran) - self._ran
        self._python = traced.python.gradients(backward)
        changing = traced.changing(self._ran, self._arguments[:weights])
        saved = traced.crossing(changing, backward, known)
        given = {t.name for t in known}
        direct = [t for t in wanted if t.op.name in self._ran and t.name not in given]
        saved = list({t.name: t for t in [*saved, *direct]}.values())
        used = traced.read_by(traced.needed_for(wanted, [*known, *saved], self._ran))
        used |= {t.name for t in wanted}
        self._keep = [k for k, t in enumerate(self._arguments) if t.name in used]
        kept = [*(self._arguments[k] for k in self._keep), *saved]
        self._feeds = [*kept, *gradients.cotangents]
        self._saved = len(saved)
        self._find_halves(gradients)
        return saved

    def _python_outputs(self) -> list[tf.Tensor]:
        """Outputs of differentiated Python functions, which always run again."""
        names = self._traced.python.differentiated(self._ran) if self._python else []
        return self._traced.outputs_of(names)

    def _find_halves(self, gradients: Gradients) -> None:
        """Choose what the input gradient passes to the weight gradient.

        Gradients of Python functions belong to the first half: forward passes may come before the
        second.
        """
        traced, weights = self._traced, gradients.weights
        inputs = [*gradients.of_inputs, *traced.outputs_of(self._python)]
        self._first = traced.needed_for(inputs, self._feeds, self._ran)
        second = traced.needed_for(weights, self._feeds, self._ran)
        more = traced.crossing(self._first, second - self._first, self._feeds)
        given = {t.name for t in self._feeds}
        direct = [t for t in weights if t.op.name in self._first and t.name not in given]
        self._handed_on = list({t.name: t for t in [*more, *direct]}.values())

    def _adding(
        self,
        name: str,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        finish: Callable[[list[Any], bool], Any],
        done: set[str],
    ) -> Callable[..., Any]:
        """A function that ends by adding to the sums, or by overwriting empty ones."""
        first = self._sums.fill(self._gradients.dense)
        if (name, first) not in self._functions:
            self._functions[name, first] = self._traced.function(
                feeds, fetches, lambda made: finish(made, first), self._xla, done
            )
        return self._functions[name, first]

    def _add_up(self, made: list[Any], first: bool, counts: bool) -> list[Any]:
        """Add up dense gradients; returns slices."""
        values, slices = iter(made), []
        dense: list[tuple[Any, tf.Tensor]] = []
        for variable, gradient in self._gradients.of_variables:
            if isinstance(gradient, tf.IndexedSlices):
                pair = [next(values), next(values)]
                slices += pair if counts else [x[:0] for x in pair]
            elif gradient is not None:
                value = next(values)
                dense.append((variable, value if counts else tf.zeros_like(value)))
        ordering = GradientOrdering([gradient for _, gradient in dense])
        for place in ordering.order:
            variable, gradient = dense[place]
            ordering.begin(gradient)
            value = tf.cast(tf.reshape(gradient, variable.shape), variable.dtype)
            total = self._sums.of(variable)
            ordering.end(gradient, (total.assign(value) if first else total.assign_add(value)).op)
        return slices
