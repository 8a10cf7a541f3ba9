"""Subgraphs of a traced computation as functions.

TensorFlow traces a stage's forward and backward pass as one graph; a pipeline runs them at
different times, and passes what both need as tensors:

    forward        inputs -> outputs, saved
    backward       inputs, saved, gradients of outputs -> gradients of inputs and of variables
    or in halves:  input gradient (more saved), later weight gradient

Each subgraph is cut at the tensors that it is fed, and compiled by itself, so that nothing is
computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ktrainer.backends.pipeline.stage.py_functions import PythonFunctions, holding
from ktrainer.steps.compiled_step import direct_call
from ktrainer.steps.graph_parts import part_of, tensor_name

# How the names of ops begin that assign to a `tf.Variable`.
_ASSIGNMENTS = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
# Ops that draw from a `tf.random.Generator`, whose state is a variable.
_DRAWS = ("Rng", "StatefulUniform", "StatefulStandard", "StatefulTruncated", "StatefulRandom")


class TracedGraph:
    """A graph that can be cut into functions.

    Args:
        graph: a `FuncGraph`: what `tf.compat.v1.wrap_function` has traced.

    Attributes:
        python: its ops that run Python functions.
        has_custom_gradients: whether an op has a custom gradient (`ops.custom_gradient`), or may
            have one, inside a Python function. It need not be linear in the upstream gradient: it
            may clip that, or take its sign.
        assigned: the `tf.Variable` that an op assigns, in words; None if there is none.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._definition = graph.as_graph_def()
        self.python = PythonFunctions(self._definition)
        bodies = [f.node_def for f in self._definition.library.function]
        every = list(itertools.chain(self._definition.node, *bodies))
        self.has_custom_gradients = any(
            "_gradient_op_type" in node.attr or node.op == "EagerPyFunc" for node in every
        )
        assigns = (node for node in every if node.op.startswith(_ASSIGNMENTS))
        self.assigned = next(map(self._variable_of, assigns), None)

    def _variable_of(self, assigns: Any) -> str:
        outer = {inner.op.name: handle for handle, inner in self.graph.captures}
        handle = outer.get(assigns.input[0])  # unknown inside of branches and functions
        name = next((v.name for v in self.graph.variables if v.handle is handle), None)
        return f"the tf.Variable {name!r}" if name else f"a tf.Variable ({assigns.name})"

    def needed_for(
        self,
        tensors: Iterable[tf.Tensor],
        given: Iterable[tf.Tensor] = (),
        done: Collection[str] = (),
    ) -> set[str]:
        """Names of the ops that compute `tensors`, from tensors that are `given`.

        Args:
            done: ops that have run before, so that nothing has to wait for them.
        """
        given = list(given)
        stop = {t.name for t in given}
        over = {*done, *(t.op.name for t in given)}  # nothing waits for what has made a given one
        needed: set[str] = set()
        waiting = [t.op for t in tensors if t.name not in stop]
        while waiting:
            op = waiting.pop()
            if op.name not in needed:
                needed.add(op.name)
                waiting += [x.op for x in op.inputs if x.name not in stop]
                waiting += [before for before in op.control_inputs if before.name not in over]
        return needed

    def crossing(
        self, source: Collection[str], target: Iterable[str], known: Iterable[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The tensors that ops in `source` make and ops in `target` need; none that is `known`,
        and no constant, which both have."""
        seen = {t.name for t in known}
        found: list[tf.Tensor] = []
        for name in sorted(target):
            for tensor in self.graph.get_operation_by_name(name).inputs:
                if tensor.op.name in source and tensor.name not in seen:
                    seen.add(tensor.name)
                    if tensor.op.type != "Const":
                        found.append(tensor)
        return found

    def changing(self, ops: set[str], fixed: Iterable[tf.Tensor]) -> set[str]:
        """Those of `ops` that depend on more than the `fixed` arguments and constants."""
        still = {t.op.name for t in fixed}
        found: set[str] = set()
        for op in self.graph.get_operations():  # in topological order
            if op.type == "Placeholder":
                starts = op.name not in still
            else:  # random numbers, for one
                starts = op.op_def is not None and op.op_def.is_stateful
            if starts or any(x.op.name in found for x in op.inputs):
                found.add(op.name)
        arguments = {op.name for op in self.graph.get_operations() if op.type == "Placeholder"}
        return (ops & found) - arguments

    def captured(self, variables: Iterable[Any]) -> list[Any]:
        """Those of Keras' `variables` that ops read without being given their values."""
        handles = {id(outer) for outer, _ in self.graph.captures}
        return [v for v in variables if v._value is not None and id(v._value.handle) in handles]

    def drawing_from_generators(self, ops: Collection[str]) -> list[str]:
        """Those of `ops` that draw from a `tf.random.Generator`, and so change its state."""
        every = holding(self._definition, lambda node: node.op.startswith(_DRAWS))
        return [name for name in every if name in ops]

    def descendants_of(self, tensors: Iterable[tf.Tensor]) -> set[str]:
        """Names of the ops that depend on any of `tensors`, and of those that make them."""
        found = {t.op.name for t in tensors}
        for op in self.graph.get_operations():  # in topological order
            if any(x.op.name in found for x in op.inputs):
                found.add(op.name)
        return found

    def outputs_of(self, ops: Iterable[str]) -> list[tf.Tensor]:
        """All tensors that `ops` make."""
        return [x for name in ops for x in self.graph.get_operation_by_name(name).outputs]

    def read_by(self, ops: Iterable[str]) -> set[str]:
        """Names of the tensors that `ops` read."""
        return {x.name for name in ops for x in self.graph.get_operation_by_name(name).inputs}

    def function(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        finish: Callable[[list[tf.Tensor]], Any] | None = None,
        xla: bool = False,
        done: Collection[str] = (),
    ) -> Callable[..., Any]:
        """A compiled function from the values of `feeds`, flat, to those of `fetches`.

        Args:
            finish: what to do with the fetched tensors inside the function, and to return.
            xla: compile with XLA.
            done: as in `needed_for`.
        """
        definition = self._part(feeds, fetches, done)
        used = {name for node in definition.node for name in map(tensor_name, node.input)}
        captured = {inner.name: outer for outer, inner in self.graph.captures}
        fed = [t.name for t in feeds]
        wanted = list(dict.fromkeys(t.name for t in fetches if t.name not in fed))

        def part(*values: tf.Tensor) -> Any:
            # Constants from outside, such as a regulariser's factor, are no tensors of a graph.
            here = tf.compat.v1.get_default_graph()
            outside = {name: here.capture(value) for name, value in captured.items()}
            given = {**outside, **dict(zip(fed, values, strict=True))}
            mapping = {name: value for name, value in given.items() if name in used}
            made = tf.graph_util.import_graph_def(
                definition, input_map=mapping, return_elements=wanted, name=""
            )
            every = {**given, **dict(zip(wanted, made or [], strict=True))}
            results = [every[t.name] for t in fetches]
            return finish(results) if finish is not None else results

        compiled = tf.function(part, autograph=False, jit_compile=xla or None)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in feeds]
        return direct_call(compiled.get_concrete_function(*specs))

    def _part(
        self, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor], done: Collection[str]
    ) -> Any:
        """The definition of the ops between `feeds` and `fetches`."""
        needed = self.needed_for(fetches, feeds, done)
        for placeholder in self.graph.captures:
            needed.discard(placeholder[1].op.name)
        return part_of(self._definition, needed)
