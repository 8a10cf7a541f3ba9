"""Parts of traced graphs: definitions of ops, functions that they call, what leads to a tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf


def part_of(definition: Any, names: Collection[str]) -> Any:
    """The definition of the named ops of a graph, with all functions of the graph."""
    part = tf.compat.v1.GraphDef()
    part.versions.CopyFrom(definition.versions)
    part.library.CopyFrom(definition.library)
    for node in definition.node:
        if node.name not in names:
            continue
        copy = part.node.add()
        copy.CopyFrom(node)
        # Both may name ops that are not in this part.
        copy.attr.pop("_class", None)
        kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
        del copy.input[:]
        copy.input.extend(kept)
    return part


def tensor_name(name: str) -> str:
    """The name of a tensor as it is written in a node's inputs, in full."""
    return name if ":" in name or name.startswith("^") else f"{name}:0"


def called_functions(node: Any) -> set[str]:
    """Names of the functions that a node calls: a call, a condition or a loop."""
    values = node.attr.values()
    return {f.name for a in values for f in (a.func, *a.list.func) if f.name}


def functions_with(library: Any, wanted: Callable[[Any], bool]) -> set[str]:
    """Names of the functions with nodes that are `wanted`, or that call such functions, however
    deep."""
    bodies = {each.signature.name: each.node_def for each in library.function}
    calls = {
        name: {c for node in body for c in called_functions(node)} for name, body in bodies.items()
    }
    found = {name for name, body in bodies.items() if any(map(wanted, body))}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def outside_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a graph inside of another one, as a branch is, has `tensor` from."""
    while tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        found = [outer for outer, inner in captures if inner is tensor]
        if not found:
            break
        tensor = found[0]
    return tensor


def upstream(values: Iterable[Any], ends: Collection[str] = ()) -> Iterator[tf.Tensor]:
    """Yield the symbolic tensors that values are computed from, and those values, each once.

    Args:
        ends: types of operations whose inputs are not followed.
    """
    waiting, seen = list(values), set[int]()
    while waiting:
        tensor = outside_of(waiting.pop())
        if tf.is_symbolic_tensor(tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
            if tensor.op.type not in ends:
                waiting += tensor.op.inputs
