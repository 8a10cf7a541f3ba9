"""Costs of the nodes of a graph, counted or measured, and of an optimizer's memory.

| kind | a node costs | unit |
|---|---|---|
| `uniform` | the same as any other | 1 |
| `parameters` | its number of parameters | parameters |
| `flops` | the operations of its forward pass (`flops.py`) | operations |
| `profile` | its time, forward and backward, on a microbatch | seconds |

The backward pass is not counted in `flops`: it is about twice the forward pass everywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.graph.nodes import Graph, Node, Tensor, last_uses
from ktrainer.backends.pipeline.partition.flops import count_flops
from ktrainer.backends.pipeline.partition.partition_inputs import NodeFacts, Variable
from ktrainer.errors import ConfigError

_PROBE_SHAPE = (8, 8)
KINDS = ("uniform", "parameters", "flops", "profile")


def node_costs(graph: Graph, kind: str, *, batch: int = 1, example: Any = None) -> list[float]:
    """The cost of each node; see the table above.

    Args:
        kind: one of `KINDS`.
        batch: examples in a microbatch, for `flops` and `profile`.
        example: a microbatch of inputs to profile with; made up otherwise, from zeros for whole
            numbers and from a normal distribution.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"must be one of {', '.join(KINDS)}, but is {kind!r}.",
            path="backend.costs",
            value=kind,
            known=KINDS,
        )
    if kind == "uniform":
        return [1.0] * len(graph.nodes)
    if kind == "parameters":
        return [float(sum(_size(v) for v in node.variables)) for node in graph.nodes]
    if kind == "flops":
        return [float(count_flops(_forward(graph, node, batch))) for node in graph.nodes]
    return profile(graph, example, batch=batch)


def describe(
    graph: Graph, costs: Sequence[float], *, batch: int = 1
) -> tuple[list[NodeFacts], dict[str, int], list[str]]:
    """Nodes, bytes of tensors and names of outputs, as `partition` takes them.

    Args:
        costs: one a node.
        batch: examples in a microbatch; other unknown dimensions count as 1.
    """
    known = {
        id(v): Variable(graph.variable_names[id(v)], _bytes(v.shape, v.dtype), _size(v), trained)
        for node in graph.nodes
        for trained, variables in ((True, node.trainable), (False, node.non_trainable))
        for v in variables
    }
    names = [tensor.name for tensor in graph.tensors]
    nodes = [
        NodeFacts(
            node.name,
            cost,
            tuple(names[i] for i in node.inputs),
            tuple(names[i] for i in node.outputs),
            tuple(known[id(v)] for v in node.variables),
        )
        for node, cost in zip(graph.nodes, costs, strict=True)
    ]
    sizes = {t.name: _bytes(_static(t, batch), t.dtype) for t in graph.tensors}
    return nodes, sizes, [names[i] for i in graph.needed_at_the_end]


def profile(graph: Graph, example: Any = None, *, batch: int = 1, runs: int = 5) -> list[float]:
    """Seconds that each node takes, forward and backward, on one microbatch.

    Each node is one `tf.function`, run on what the nodes before it really compute: once to
    compile and then `runs` times, of which the median counts. Variables must have values, and
    keep them: statistics and seeds are not advanced.
    """
    flat = keras.tree.flatten(example) if example is not None else None
    tensors = {
        i: _made_up(graph.tensors[i], batch) if flat is None else tf.convert_to_tensor(flat[n])
        for n, i in enumerate(graph.inputs)
    }
    last = last_uses(graph.nodes)
    seconds = []
    for position, node in enumerate(graph.nodes):
        step = tf.function(_forward_backward(node), autograph=False)
        arguments = [tensors[i] for i in node.inputs]
        outputs, _ = step(*arguments)  # compiles
        seconds.append(statistics.median(_timed(step, arguments) for _ in range(runs)))
        tensors.update(zip(node.outputs, outputs, strict=True))
        for i in node.inputs:
            if last[i] == position:
                del tensors[i]
    return seconds


def _timed(step: Callable[..., Any], arguments: Sequence[Any]) -> float:
    start = time.perf_counter()
    for result in tf.nest.flatten(step(*arguments), expand_composites=True):
        if tf.is_tensor(result) and result.shape.num_elements():
            # Waits for devices that compute asynchronously.
            tf.reshape(result, [-1])[0].numpy()
            break
    return time.perf_counter() - start


def _forward_backward(node: Node) -> Callable[..., Any]:
    # Where a variable has no value, this is one that its initializer makes, for this node alone.
    values = [(v, v.value) for v in node.variables]

    def step(*arguments: Any) -> tuple[tuple[Any, ...], list[Any]]:
        known = [(v, tf.convert_to_tensor(value)) for v, value in values]
        sources = [value for v, value in known if v.trainable]
        sources += filter(_differentiable, arguments)
        # Updates of variables, such as moving statistics, end in the scope and are dropped.
        scope = keras.StatelessScope(state_mapping=known, initialize_variables=False)
        with scope, tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs = node(dict(zip(node.inputs, arguments, strict=True)))
        results = [x for x in outputs if _differentiable(x)]
        gradients = tape.gradient(results, sources) if results and sources else []
        return outputs, [g for g in gradients if g is not None]

    return step


def _differentiable(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


def _forward(graph: Graph, node: Node, batch: int) -> tf.Graph:
    """The TensorFlow graph of a node's forward pass with static shapes."""

    def step(values: list[Any], *arguments: Any) -> tuple[Any, ...]:
        known = list(zip(node.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=known, initialize_variables=False):
            return node(dict(zip(node.inputs, arguments, strict=True)))

    # Values are arguments: an initializer's work is not the node's.
    values = [tf.TensorSpec(v.shape, v.dtype) for v in node.variables]
    specs = [_spec(graph.tensors[i], batch) for i in node.inputs]
    return tf.function(step, autograph=False).get_concrete_function(values, *specs).graph


def _spec(tensor: Tensor, batch: int) -> tf.TypeSpec:
    kind = tf.SparseTensorSpec if tensor.sparse else tf.TensorSpec
    return kind(_static(tensor, batch), tensor.dtype)


def _made_up(tensor: Tensor, batch: int) -> Any:
    shape = _static(tensor, batch)
    if tf.as_dtype(tensor.dtype).is_floating:
        value = tf.cast(tf.random.stateless_normal(shape, seed=(0, tensor.id)), tensor.dtype)
    else:
        value = tf.zeros(shape, tensor.dtype)
    return tf.sparse.from_dense(value) if tensor.sparse else value


def _static(tensor: Tensor, batch: int) -> tuple[int, ...]:
    """The shape with the batch filled in; further unknown dimensions are 1."""
    return tuple(
        d if d is not None else batch if axis == 0 else 1 for axis, d in enumerate(tensor.shape)
    )


def _bytes(shape: Sequence[int], dtype: str) -> int:
    if dtype == "string":
        return 8 * math.prod(shape)  # a pointer each: their lengths are not known
    return math.prod(shape) * tf.as_dtype(dtype).size


def _size(variable: Any) -> int:
    return math.prod(variable.shape)


def state_factor(optimizer: Any) -> float:
    """Bytes for each byte of a trainable variable: itself, its gradient and optimizer slots.

    4 for Adam, 3 for SGD with momentum, 2 for SGD, and 1 without an optimizer.
    """
    if optimizer is None:
        return 1.0
    try:
        copy = type(optimizer).from_config(optimizer.get_config())
    except Exception:  # a custom optimizer need not have a config; assume Adam's
        return 4.0
    copy.build([keras.Variable(keras.ops.zeros(_PROBE_SHAPE), name="probe")])
    slots = sum(math.prod(v.shape) for v in copy.variables if len(v.shape))
    return 2.0 + slots / math.prod(_PROBE_SHAPE)
