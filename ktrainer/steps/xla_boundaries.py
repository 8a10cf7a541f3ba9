"""Where a step that XLA compiles in segments is divided: the ops that stay between them."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf

from ktrainer.steps.graph_parts import called_functions, functions_with

_LEAST_BYTES = 2**18  # of what boundaries are given, for a segment of their own
_COMMUNICATION = ("PyFunc", "EagerPyFunc", "Horovod")  # types of ops begin so
_AS_THEY_ARE = ("Assert", "Qr")  # likewise; QR is PowerSGD's: the same bits on all processors


def find_boundaries(ops: Sequence[tf.Operation], library: Any) -> list[tf.Operation]:
    """Those of `ops` that stay between segments.

    Args:
        library: of the functions that they call.
    """
    communicating, checking = functions_with(library, _communicates), _functions_that_check(library)
    return [op for op in ops if _is_boundary(op, communicating, checking)]


def _is_boundary(op: tf.Operation, communicating: set[str], checking: set[str]) -> bool:
    """Whether an op stays between segments.

    Args:
        communicating, checking: names of functions that do so; the latter as branches.
    """
    if op.type.startswith((*_COMMUNICATION, *_AS_THEY_ARE)):
        return True
    watched = communicating | checking if op.type in ("If", "StatelessIf") else communicating
    return not watched.isdisjoint(called_functions(op.node_def))


def _communicates(node: Any) -> bool:
    kind: str = node.op
    return kind.startswith(_COMMUNICATION)


def _functions_that_check(library: Any) -> set[str]:
    """Names of the functions with an assertion: TensorFlow puts most in a branch."""
    return {
        each.signature.name
        for each in library.function
        if any(node.op == "Assert" for node in each.node_def)
    }


def group_boundaries(boundaries: Sequence[tf.Operation]) -> list[int]:
    """For each boundary, the number of the last one that shares its segments: a program for each
    small gradient would take longer than it saves."""
    numbers, waiting, nbytes = [0] * len(boundaries), [], 0
    for number, op in enumerate(boundaries):
        waiting.append(number)
        nbytes += sum((x.shape.num_elements() or 0) * x.dtype.size for x in op.inputs)
        if nbytes >= _LEAST_BYTES or number == len(boundaries) - 1:
            for each in waiting:
                numbers[each] = number
            waiting, nbytes = [], 0
    return numbers


def by_depth(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Ops after those that they depend on: the gradients of the last layers, which need the
    shortest backward pass, before those of the first ones."""
    known = {op.name: op for op in ops}
    sorter = TopologicalSorter({op.name: [x.name for x in before(op)] for op in ops})
    depths: dict[str, int] = {}
    for name in sorter.static_order():
        depths[name] = 1 + max((depths[x.name] for x in before(known[name])), default=0)
    return sorted(ops, key=lambda op: depths[op.name])


def before(op: tf.Operation) -> list[tf.Operation]:
    """The ops that an op waits for."""
    return [*(x.op for x in op.inputs), *op.control_inputs]
