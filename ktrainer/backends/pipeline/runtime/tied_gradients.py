"""Gradients of variables that several partitions hold: tied weights, layers called twice.

Every holder ends with the same bits: the first one adds up what all of them have, in the order
of partitions, and gives the sum to the others. A holder sends its part as soon as its last
backward pass with that variable is done, while stages before it are still at theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.distributed.mpi_progress import has_completed

Slices = dict[int, list[Any]]  # values and indices in turn, by the variable's `id()`
Gradient = Any  # an array, (values, indices), or None

_HEADER = 4  # int64: kind, rows of slices, types of values and of indices
_NONE, _DENSE, _SLICES = range(3)


@dataclass
class _Incoming:
    """A gradient that is being received: first its header, then its arrays."""

    header: np.ndarray
    requests: list[Any]
    arrays: list[np.ndarray] | None = None  # None until the header has arrived


class TiedGradients:
    """Sums gradients over the partitions that hold a variable.

    Args:
        variables: all that are trained and that several partitions hold, in the model's order.
        holders: the partitions of each variable, by `id()`.
        sums: of dense gradients, in this process.
        transport: to the other partitions; it knows how many `variables` there are.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        holders: Mapping[int, Sequence[int]],
        sums: GradientAccumulators,
        transport: Transport,
    ) -> None:
        here = transport.world.rank
        self.holders, self.sums, self.transport, self._here = holders, sums, transport, here
        self._places = {id(v): k for k, v in enumerate(variables)}  # which message is whose
        self.variables = [v for v in variables if here in holders[id(v)]]
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._sending: list[tuple[list[Any], Any, str]] = []
        self._sent: set[int] = set()
        transport.world.keep_if_interrupted(self)

    def by_holders(self) -> list[list[Any]]:
        """`variables` in groups that the same partitions hold; each of those has the group."""
        groups: dict[tuple[int, ...], list[Any]] = {}
        for variable in self.variables:
            groups.setdefault(tuple(self.holders[id(variable)]), []).append(variable)
        return list(groups.values())

    def begin(self) -> None:
        """Post the receives of a step, so that messages arrive while stages compute."""
        self._sent.clear()
        for variable in self.variables:
            first, *others = self.holders[id(variable)]
            for source in others if first == self._here else [first]:
                header = np.empty(_HEADER, np.int64)
                requests = self.transport.start_receive(header, source, self._places[id(variable)])
                self._incoming[id(variable), source] = _Incoming(header, requests)

    def complete(self, variable: Any, slices: Slices) -> None:
        """Start to send a gradient to which this process adds nothing more."""
        first = self.holders[id(variable)][0]
        if first != self._here and id(variable) not in self._sent:
            self._sent.add(id(variable))
            densify(variable, slices, self.sums)
            self._send(variable, self._take(variable, slices), first)

    def progress(self) -> None:
        """Allocate buffers for gradients whose headers have arrived; call between actions."""
        for (variable, source), incoming in self._incoming.items():
            if incoming.arrays is None and all(map(has_completed, incoming.requests)):
                self._receive_arrays(variable, source, incoming)

    def __call__(self, slices: Slices) -> None:
        """Sum, in place: both the dense sums and `slices`."""
        for variable in self.variables:
            self.complete(variable, slices)
        for variable in self.variables:
            first, *others = self.holders[id(variable)]
            if first == self._here:
                mine = self._take(variable, slices)
                total = _sum(variable, [mine, *(self._receive(variable, p) for p in others)])
                for partition in others:
                    self._send(variable, total, partition)
            else:
                total = self._receive(variable, first)
            self._put(variable, slices, total)
        for requests, _, what in self._sending:
            self.transport.wait(requests, what)
        self._sending.clear()

    def _send(self, variable: Any, gradient: Gradient, partition: int) -> None:
        place = self._places[id(variable)]
        header, arrays = _pack(gradient)
        requests = [
            request
            for array in (header, *arrays)
            for request in self.transport.start_send(array, partition, place)
        ]
        what = f"the gradient of {variable.path} to {self.transport.rank_name(partition)}"
        self._sending.append((requests, (header, arrays), what))

    def _receive(self, variable: Any, source: int) -> Gradient:
        """Wait for the gradient that another partition sends."""
        what = f"the gradient of {variable.path} from {self.transport.rank_name(source)}"
        incoming = self._incoming[id(variable), source]
        if incoming.arrays is None:
            self.transport.wait(incoming.requests, what)
            self._receive_arrays(id(variable), source, incoming)
        self.transport.wait(incoming.requests, what)
        del self._incoming[id(variable), source]
        arrays = incoming.arrays or []
        return tuple(arrays) if len(arrays) > 1 else arrays[0] if arrays else None

    def _receive_arrays(self, key: int, source: int, incoming: _Incoming) -> None:
        """Post the receives of the arrays that a header announces."""
        variable = next(v for v in self.variables if id(v) == key)
        kind, rows, *types = (int(x) for x in incoming.header)
        shape = tuple(variable.shape)
        shapes = {_NONE: [], _DENSE: [shape], _SLICES: [(rows, *shape[1:]), (rows,)]}[kind]
        incoming.arrays = [
            np.empty(shape, tf.as_dtype(number).as_numpy_dtype)
            for shape, number in zip(shapes, types, strict=False)
        ]
        incoming.requests = [
            request
            for array in incoming.arrays
            for request in self.transport.start_receive(array, source, self._places[key])
        ]

    def _take(self, variable: Any, slices: Slices) -> Gradient:
        """This partition's gradient."""
        pairs = slices.pop(id(variable), None)
        if self.sums.has(variable):
            return self.sums.of(variable).numpy()
        if pairs is None:
            return None
        return np.concatenate(pairs[0::2]), np.concatenate(pairs[1::2])

    def _put(self, variable: Any, slices: Slices, total: Gradient) -> None:
        if isinstance(total, tuple):
            slices[id(variable)] = [tf.convert_to_tensor(part) for part in total]
        elif total is not None:
            self.sums.put(variable, total)


def densify(variable: Any, slices: Slices, sums: GradientAccumulators) -> None:
    """Add slices to the dense sum of a variable that has both, from two stages of a process."""
    if sums.has(variable) and id(variable) in slices:
        gradient = tf.IndexedSlices(*joined(slices.pop(id(variable))), variable.shape)
        sums.of(variable).assign_add(tf.convert_to_tensor(gradient))


def joined(pairs: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """The slices of all microbatches as one: repeated indices stay apart, because Keras'
    adaptive optimizers square each slice on its own."""
    return tf.concat(list(pairs[0::2]), 0), tf.concat(list(pairs[1::2]), 0)


def _pack(gradient: Gradient) -> tuple[np.ndarray, list[np.ndarray]]:
    """A header, and the arrays that it announces."""
    if gradient is None:
        return np.array([_NONE, 0, 0, 0], np.int64), []
    parts = gradient if isinstance(gradient, tuple) else (gradient,)
    arrays = [np.ascontiguousarray(part) for part in parts]
    types = [tf.as_dtype(array.dtype).as_datatype_enum for array in arrays]
    if len(arrays) == 1:
        return np.array([_DENSE, 0, *types, 0], np.int64), arrays
    return np.array([_SLICES, len(arrays[1]), *types], np.int64), arrays


def _sum(variable: Any, gradients: Sequence[Gradient]) -> Gradient:
    """The sum: slices joined if there is nothing else, else a dense array."""
    present = [g for g in gradients if g is not None]
    if not present:
        return None
    if all(isinstance(g, tuple) for g in present):
        return np.concatenate([g[0] for g in present]), np.concatenate([g[1] for g in present])
    total = np.zeros(variable.shape, variable.dtype)
    for gradient in present:
        if isinstance(gradient, tuple):
            np.add.at(total, gradient[1], gradient[0])
        else:
            total += gradient
    return total
