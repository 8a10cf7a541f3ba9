"""Variables that the step of a loop of the user's own assigns, made equal on all ranks.

Each rank assigns what its rows of the batch give. At the end of the step one collective makes of
all that, by the `aggregation` of each variable, what one process would have assigned:

    sum     metrics: the value before the step, plus what each rank has added
    mean    moving statistics: the average over ranks, weighted by their rows

Variables of Keras that are not trained and declare none, as the statistics of BatchNormalization,
are averaged if they are floats, unless a rank adds up its gradients in them. All others are left as
each rank has assigned them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced_in
from ktrainer.steps.assertions import assert_in_graph, assert_some_rows
from ktrainer.steps.gradient_flow import LOCAL, reference
from ktrainer.steps.step_context import StepContext, present_graph
from ktrainer.steps.variable_assignments import (
    ADDING,
    aggregation_of,
    assignments,
    constant_of,
    is_added_to,
)

_UNCLEAR = (
    "the arguments of trainer.run have different numbers of rows, so it is unclear by how many to "
    "weigh the statistics of layers. Give the step constants otherwise: as variables, or let it "
    "use them from outside. Rows of the first argument:"
)
_IN_BRANCH = (
    "a branch or a loop on tensors sets {variable}, which ranks add to, as reset_state does: what "
    "they have added then depends on whether it runs. Reset it outside of branches and loops, or "
    "between two steps."
)
_COMPUTED = (
    "a step sets {variable}, which ranks add to, to a value that it computes: each rank has its "
    "own, and what it has added is unknown. Set it to a constant, then add to it: assign(0.0), "
    "assign_add(value). Or make it with another aggregation, such as the mean."
)
_IN_PARTS = (
    "{name} sets a part of {variable}, whose values on all ranks are added up or averaged: ranks "
    "may set the same part differently. Add to it (scatter_add, scatter_nd_add, assign_add), "
    "assign the whole variable, or make it without an aggregation."
)
_UPDATED_BY_HAND = (
    "a step updates {variable} by this rank's part of its gradient, without an optimizer, so the "
    "weights of ranks would drift apart. Apply gradients by a Keras optimizer, which sums them "
    "over ranks; or sum them first, by all_reduce('sum', gradients) of "
    "tf.distribute.get_replica_context(). What is each rank's own is made with trainable=False."
)


_MOVED_AND_BACK = (
    "a step moves {variable} by this rank's part of its gradient, and back, as sharpness-aware "
    "minimization does: training is not that of one process. Sum gradients first, by "
    "all_reduce('sum', gradients) of tf.distribute.get_replica_context()."
)


class _Assigned(NamedTuple):
    variable: tf.Variable
    kind: str
    before: tf.Tensor


class AssignedVariables:
    """Notes what a step assigns while it is traced, then reduces it.

    Args:
        context: the step's.
        among: `id()` of the Keras variables that are noted; None: any, and those of TensorFlow.

    Attributes:
        leaves: whether variables of TensorFlow, or sums of gradients, are left as each rank has
            assigned them.
    """

    def __init__(self, context: StepContext, among: Collection[int] | None = None) -> None:
        self._context, self._among = context, among
        self._graph = present_graph()
        self._found: dict[int, _Assigned] = {}
        self._others: set[int] = set()
        self._moves: dict[int, tuple[tf.Variable, dict[Any, int]]] = {}  # by what, how often
        self.leaves = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context in which assignments are noted, but for those of optimizers."""
        self._context.on_assign = self._note
        replacements = assignments(self._noting) if self._among is None else []
        with replaced_in(self._context, replacements):
            yield

    def reduce(self) -> None:
        """Give the noted variables their values over all ranks, in one collective.

        Raises:
            ModelError: the step has moved a weight by a part of its gradient, and not back.
        """
        self._check_moves()
        if self._context.collectives is None or not self._found:
            return
        found = list(self._found.values())
        values = [tf.identity(each.variable) for each in found]
        kinds, before = [each.kind for each in found], [each.before for each in found]
        every = over_all_ranks(self._context, kinds, before, values)
        for each, value in zip(found, every, strict=True):
            if each.kind == "sum":
                value += tf.cast(each.before, tf.float64)
            each.variable.assign(tf.cast(value, each.variable.dtype))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        def assign(variable: Any, *args: Any, **named: Any) -> Any:
            if not self._context.updating:
                self._note_move(variable, name, *args, *named.values())
            if not self._context.updating and id(variable) not in self._others:
                value = (args[0] if args else named.get("value")) if name == "assign" else None
                self._note(variable, value)
                if name not in ("assign", *ADDING) and id(variable) in self._found:
                    raise ModelError(_IN_PARTS.format(name=name, variable=variable.name))
            return original(variable, *args, **named)

        return assign

    def _note_move(self, variable: tf.Variable, name: str, *values: Any) -> None:
        """Note that a weight, which ranks do not keep equal, is moved by a part of its gradient, or
        back."""
        context = self._context
        several = context.collectives is not None and context.collectives.size > 1
        if not several or self._among is not None or id(variable) in self._found:
            return
        if not variable.trainable:
            return  # such as perturbations of a rank's own rows
        sources = {id(_inner(source)) for _, source in context.part_gradients.values()}
        if id(variable) not in sources or aggregation_of(variable) is not None:
            return
        value = next(filter(tf.is_tensor, values), None)
        _, moves = self._moves.setdefault(id(variable), (variable, {}))
        times, by = _move(variable, name, value)
        if times == 0:
            moves.clear()  # it has another value from here on
        if context.flow.changes(value) is not None:
            moves[by] = moves.get(by, 0) + (times or 1)

    def _check_moves(self) -> None:
        """Refuse weights that a step has moved by a part of their gradients, and not back.

        Raises:
            ModelError: there is one.
        """
        for variable, moves in self._moves.values():
            if any(moves.values()):
                raise ModelError(_UPDATED_BY_HAND.format(variable=variable.name))
            if moves:
                warnings.warn(_MOVED_AND_BACK.format(variable=variable.name), stacklevel=2)

    def _note(self, variable: Any, value: Any) -> None:
        """Keep the value of a variable before its first assignment in the step.

        Raises:
            ModelError: a branch or a loop sets a sum: it is unclear whether it does; or the step
                sets one to a value that is computed.
        """
        if self._among is not None and id(variable) not in self._among:
            return
        inner = _inner(variable)
        if id(inner) in self._others:
            return
        of_part = self._is_of_part(variable, value)
        if of_part:
            self._found.pop(id(inner), None)
        if id(inner) not in self._found:
            kind = None if of_part else aggregation_of(variable)
            if kind is None:
                self._others.add(id(inner))
                self.leaves = self.leaves or of_part or inner is variable
                return
            self._found[id(inner)] = _Assigned(inner, kind, self._value_of(inner))
        found = self._found[id(inner)]
        if found.kind != "sum" or value is None:
            return
        constant = constant_of(value)
        if constant is None:
            # What `fit` assigns may come from outside; eager values are not known to be sums.
            unclear = self._among is None and self._graph is not None
            if unclear and not is_added_to(inner, tf.convert_to_tensor(value)):
                raise ModelError(_COMPUTED.format(variable=inner.name))
            return
        if not self._is_certain():
            raise ModelError(_IN_BRANCH.format(variable=inner.name))
        self._found[id(inner)] = found._replace(before=constant.astype(inner.dtype.as_numpy_dtype))

    def _is_of_part(self, variable: Any, value: Any) -> bool:
        """Return whether a value is a sum of this rank's gradients, which an optimizer that applies
        them sums over ranks, for a variable that declares no aggregation."""
        if not isinstance(variable, keras.Variable) or variable.aggregation != "none":
            return False
        changes = self._context.flow.changes(value)
        return changes is not None and not changes - {LOCAL}

    def _is_certain(self) -> bool:
        """Return whether the present part of the step always runs, once."""
        graph = present_graph()
        return graph is self._graph or (
            bool(self._context.compiled) and graph.outer_graph is self._graph
        )

    def _value_of(self, variable: tf.Variable) -> tf.Tensor:
        if self._graph is None:
            return tf.identity(variable)
        # The assignment may be in a branch or a loop of the step; the value is read ahead of it.
        with self._graph.as_default(), tf.control_dependencies(None):
            return tf.identity(variable)


def _move(variable: tf.Variable, name: str, value: Any) -> tuple[int, Any]:
    """How often an assignment adds a tensor to a variable, and the tensor's reference; 0 times: it
    assigns the tensor."""
    if name in ("assign_add", "assign_sub"):
        return (1 if name == "assign_add" else -1), reference(value)
    operation = value.op if tf.is_symbolic_tensor(value) else None
    if operation is not None and operation.type in ("AddV2", "Sub"):
        before, by = operation.inputs
        if operation.type == "AddV2" and is_added_to(variable, by):
            before, by = by, before
        if is_added_to(variable, before):
            return (1 if operation.type == "AddV2" else -1), reference(by)
    return 0, reference(value)


def _inner(variable: Any) -> tf.Variable:
    return variable._value if isinstance(variable, keras.Variable) else variable


def over_all_ranks(
    context: StepContext,
    kinds: Sequence[str],
    before: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Combine what all ranks have assigned: of `sum` the additions, of `mean` the values.

    Args:
        context: of the step.
        kinds: `sum` or `mean`, by variable.
        before: their values before the step.
        values: what this rank has assigned.

    Returns:
        float64 tensors, the same on all ranks, from one collective.
    """
    assert context.collectives is not None
    rows, checks = context.rows, []
    if rows is not None and "mean" in kinds and context.rows_agree is not None:
        checks = assert_in_graph(context.rows_agree, _UNCLEAR, rows)
    with tf.control_dependencies(checks):
        share = tf.ones([], tf.float64) if rows is None else tf.cast(rows, tf.float64)
    parts = []
    for kind, old, value in zip(kinds, before, values, strict=True):
        new = tf.cast(value, tf.float64)
        if kind == "sum":
            parts.append(_added(context, new - tf.cast(old, tf.float64)))
        else:
            parts.append(tf.math.multiply_no_nan(new, share))
    total = context.collectives.sum(concatenated([*parts, share]), context.order)
    *sums, shares = split_like(total, [*parts, share])
    if rows is not None and "mean" in kinds:
        with tf.control_dependencies(assert_some_rows(shares)):
            shares = tf.identity(shares)
    return [
        total if kind == "sum" else total / shares for kind, total in zip(kinds, sums, strict=True)
    ]


def _added(context: StepContext, more: tf.Tensor) -> tf.Tensor:
    usable = tf.fill(tf.shape(more), context.weight > 0)
    if context.sums:  # else what has no rows is padding
        # Of no rows a user's mean is NaN, which must not reach the ranks that have some.
        usable |= tf.math.is_finite(more)
    return tf.where(usable, more, tf.zeros_like(more))


def concatenated(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The elements of tensors of one dtype as a vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def split_like(vector: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inverse of `concatenated`: `vector` in the shapes of `tensors`."""
    parts = tf.split(vector, [tf.size(tensor) for tensor in tensors])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
