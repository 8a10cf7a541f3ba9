"""XLA for steps that communicate: what lies between the collectives is compiled, they are not.

A step is traced as it is without XLA, and its graph is divided:

    boundaries    host functions and Horovod's operations, which XLA cannot compile; assertions,
                  which it would leave out; PowerSGD's QR, which must have the same bits on all
                  processors; loops that communicate, or whose outputs are communicated before
                  their backward pass, and branches that communicate and read their lists, with
                  all ops on lists: XLA does not hand these out
    segments      the ops that the next boundary needs, each segment a function that XLA compiles
    the update    the ops that depend on a boundary and that none needs: as they are

So the gradients of the first bucket are a program of their own, and are summed while the next
program computes. A level keeps segments apart that wait for different boundaries:

    level of an op    1 + the last boundary that it depends on; 0: it depends on none
    need of an op     the first boundary that depends on it

Each segment has the ops of one level and one need, so that no two of them wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ktrainer.distributed.collectives import OUTSIDE_XLA
from ktrainer.steps.graph_parts import part_of, tensor_name
from ktrainer.steps.xla_boundaries import before, by_depth, find_boundaries, group_boundaries

_NOT_HANDED_OUT = (tf.variant, tf.resource)  # lists of tensors, of loops

Segment = tuple[int, int]  # level, need


def compile_segments(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with all that lies between its collectives compiled with XLA, to be traced."""
    kept: list[Any] = []  # graphs own their host functions, and concrete functions what they run

    def in_segments(*args: Any) -> Any:
        if tf.executing_eagerly():
            return step(*args)
        # As for XLA: loops and broadcasts have other gradients then.
        whole = tf.function(step, jit_compile=True, autograph=False)
        traced = whole.get_concrete_function(*args)
        segmented = _SegmentedGraph(traced.graph)
        kept.append((traced, segmented))
        given = [x for x in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(x)]
        return _import(traced, segmented, given)

    return in_segments


def _import(traced: Any, segmented: _SegmentedGraph, given: Sequence[tf.Tensor]) -> Any:
    """The outputs of a traced function, its ops put into the graph that is being traced."""
    graph, here = traced.graph, tf.compat.v1.get_default_graph()
    captured = {inner.name: here.capture(outer) for outer, inner in graph.captures}
    feeds = [tensor.name for tensor in graph.inputs if tensor.name not in captured]
    inputs = {**captured, **dict(zip(feeds, given, strict=True))}
    definition = segmented.definition()
    used = {tensor_name(name) for node in definition.node for name in node.input}
    wanted = list({x.name: x for x in traced.outputs if x.name not in inputs}.values())
    found = tf.graph_util.import_graph_def(
        definition,
        input_map={name: value for name, value in inputs.items() if name in used},
        return_elements=[segmented.renamed(tensor.name) for tensor in wanted],
        name="",
    )
    for tensor, value in zip(wanted, found or [], strict=True):
        value.set_shape(tensor.shape)
        inputs[tensor.name] = value
    outputs = iter([inputs[tensor.name] for tensor in traced.outputs])
    return tf.nest.map_structure(
        lambda leaf: next(outputs) if tf.is_tensor(leaf) else leaf,
        traced.structured_outputs,
        expand_composites=True,
    )


class _SegmentedGraph:
    """A traced graph, divided into segments.

    Args:
        graph: a `FuncGraph`.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._traced = graph.as_graph_def()
        self._ops = by_depth(graph.get_operations())
        self._boundaries = find_boundaries(self._ops, self._traced.library)
        self._levels = self._find_levels()
        if self._loops_wait():
            loops = {
                x for op in self._ops if (readers := _readers_inside(op)) for x in (op, *readers)
            }
            loops.update(self._boundaries)
            self._boundaries = [op for op in self._ops if op in loops]
            self._levels = self._find_levels()
        self._needs = self._find_needs()
        self._segments = self._divide()
        self._outputs: dict[str, str] = {}  # of segments, by the names that they had
        self._functions: list[Any] = []

    def _find_levels(self) -> dict[str, int]:
        """The level of each op; what XLA does not hand out is made where it is read."""
        numbers = {op.name: i for i, op in enumerate(self._boundaries)}
        levels = dict.fromkeys((op.name for op in self._ops), 0)
        changes = True
        while changes:
            changes = False
            for op in self._ops:
                known = [max(levels[x.name], numbers.get(x.name, -1) + 1) for x in before(op)]
                inside = [] if op.name in numbers else _readers_inside(op)
                after = [levels[x.name] for x in inside if x.name not in numbers]
                level = max([*known, *after], default=0)
                changes |= level != levels[op.name]
                levels[op.name] = level
        return levels

    def _loops_wait(self) -> bool:
        """Whether no segment can have all of a loop: its outputs are communicated before its
        backward pass, or boundaries make or read its lists."""
        first = self._first_to_need(range(len(self._boundaries)))
        made = (x.op for op in self._boundaries for x in op.inputs)
        return any(self._levels[name] > number for name, number in first.items()) or any(
            _readers_inside(op) for op in (*self._boundaries, *made)
        )

    def _first_to_need(
        self,
        numbers: Sequence[int],
        together: Callable[[tf.Operation], list[tf.Operation]] = lambda _: [],
    ) -> dict[str, int]:
        """The number of the first boundary that needs an op, by the op's name.

        Args:
            numbers: of the boundaries.
            together: the ops that belong into the segment of an op, too.
        """
        found: dict[str, int] = {}
        for number, op in zip(numbers, self._boundaries, strict=True):
            waiting = before(op)
            while waiting:
                other = waiting.pop()
                if other.name not in found:
                    found[other.name] = number
                    waiting += [*before(other), *together(other)]
        return found

    def _find_needs(self) -> dict[str, int]:
        """The number of the first boundary that needs an op, by the op's name."""
        needs = self._first_to_need(group_boundaries(self._boundaries), _readers_inside)
        last = len(self._boundaries)
        for op in self._ops:
            if self._levels[op.name] == 0:
                needs.setdefault(op.name, last)
        return needs

    def _divide(self) -> dict[Segment, list[tf.Operation]]:
        segments: dict[Segment, list[tf.Operation]] = defaultdict(list)
        numbers = {op.name for op in self._boundaries}
        for op in self._ops:
            left = op.type in ("Placeholder", "Const") or op.name in numbers or _is_read(op)
            if left or op.name not in self._needs or OUTSIDE_XLA in op.node_def.attr:
                continue
            segments[self._levels[op.name], self._needs[op.name]].append(op)
        return segments

    # -- the graph with a call in place of each segment

    def definition(self) -> Any:
        """The definition of the graph in which each segment is one call."""
        calls = {op.name: _name(key) for key, ops in self._segments.items() for op in ops}
        made = [self._call_of(key, ops, calls) for key, ops in self._segments.items()]
        result = tf.compat.v1.GraphDef()
        result.versions.CopyFrom(self._traced.versions)
        result.library.CopyFrom(self._traced.library)
        for node, function in made:
            result.node.add().CopyFrom(node)
            result.library.MergeFrom(function.graph.as_graph_def().library)
            result.library.function.add().CopyFrom(function.function_def)
        inputs = {op.name for op in self._ops if op.type == "Placeholder"}
        for node in self._traced.node:
            if node.name not in calls and node.name not in inputs:
                result.node.add().CopyFrom(node)
        for node in result.node:
            node.attr.pop("_class", None)  # may name ops that are not there
            names = dict.fromkeys(self._renamed_input(name, calls) for name in node.input)
            controls = [name for name in names if name.startswith("^") and name[1:] not in inputs]
            data = [self.renamed(name) for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend([*data, *(name for name in controls if name[1:] != node.name)])
        _drop_repeated(result.library)
        return result

    def renamed(self, name: str) -> str:
        """The name of a tensor in that graph."""
        return self._outputs.get(tensor_name(name), name)

    @staticmethod
    def _renamed_input(name: str, calls: dict[str, str]) -> str:
        return f"^{calls.get(name[1:], name[1:])}" if name.startswith("^") else name

    def _call_of(
        self, key: Segment, ops: list[tf.Operation], calls: dict[str, str]
    ) -> tuple[Any, Any]:
        """The node that calls a segment, and the segment's concrete function."""
        inside = {op.name for op in ops}
        read = {x.name: x for op in ops for x in op.inputs if x.op.name not in inside}
        constants = _constants_of(ops)
        feeds = [x for x in read.values() if x.op.type != "Const"]
        fetches = [x for op in ops for x in op.outputs if self._is_read_outside(x, inside)]
        function = self._function(inside | {x.name for x in constants}, feeds, fetches)
        # TensorFlow runs functions that have a state one after the other, host functions too.
        stateful = any(op.op_def is None or op.op_def.is_stateful for op in ops)
        kind = "StatefulPartitionedCall" if stateful else "PartitionedCall"
        node = tf.compat.v1.NodeDef(name=_name(key), op=kind)
        node.input.extend(x.name for x in feeds)
        after = [x for op in [*ops, *constants] for x in op.control_inputs if x.type != "Const"]
        node.input.extend(f"^{name}" for name in sorted({x.name for x in after} - inside))
        node.attr["f"].func.name = function.function_def.signature.name
        node.attr["Tin"].list.type.extend(x.dtype.as_datatype_enum for x in feeds)
        node.attr["Tout"].list.type.extend(x.dtype.as_datatype_enum for x in fetches)
        node.attr["_XlaMustCompile"].b = True
        self._functions.append(function)
        self._outputs |= {x.name: f"{node.name}:{i}" for i, x in enumerate(fetches)}
        return node, function

    def _is_read_outside(self, tensor: tf.Tensor, inside: set[str]) -> bool:
        readers = tensor.consumers()
        returned = any(tensor is output for output in self._graph.outputs)
        return returned or any(op.name not in inside for op in readers)

    def _function(
        self, names: set[str], feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor]
    ) -> Any:
        """A concrete function of the named ops, from the values of `feeds` to `fetches`."""
        part = part_of(self._traced, names)

        def run(*values: tf.Tensor) -> Any:
            given = dict(zip((x.name for x in feeds), values, strict=True))
            wanted = [x.name for x in fetches]
            return tf.graph_util.import_graph_def(
                part, input_map=given, return_elements=wanted, name=""
            )

        specs = [tf.TensorSpec(x.shape, x.dtype) for x in feeds]
        compiled = tf.function(run, jit_compile=True, autograph=False)
        return compiled.get_concrete_function(*specs)


def _is_read(op: tf.Operation) -> bool:
    """Whether an op reads a variable as it is before the step. XLA would copy what others read."""
    return op.type == "ReadVariableOp" and all(x.type == "Placeholder" for x in before(op))


def _readers_inside(op: tf.Operation) -> list[tf.Operation]:
    """The ops that read what `op` makes and XLA does not hand out."""
    if op.type == "Placeholder":
        return []
    return [x for out in op.outputs if out.dtype in _NOT_HANDED_OUT for x in out.consumers()]


def _constants_of(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The constants that ops depend on at once or through others, of which each has a copy."""
    found: dict[str, tf.Operation] = {}
    waiting = list(ops)
    while waiting:
        for x in before(waiting.pop()):
            if x.type == "Const" and x.name not in found:
                found[x.name] = x
                waiting.append(x)
    return list(found.values())


def _name(key: Segment) -> str:
    return "xla_segment_{}_{}".format(*key)


def _drop_repeated(library: Any) -> None:
    """Keep the first of functions with one name: segments share functions."""
    every = {each.signature.name: each for each in reversed(library.function)}
    kept = [tf.compat.v1.GraphDef().library.function.add() for _ in every]
    for copy, each in zip(kept, every.values(), strict=True):
        copy.CopyFrom(each)
    del library.function[:]
    library.function.extend(kept)
