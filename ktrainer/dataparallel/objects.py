"""Variables and Python objects from one rank to all, and barriers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ktrainer.dataparallel.calls import Call, call_of, specs_of
from ktrainer.dataparallel.handlers import carry_out
from ktrainer.dataparallel.host_calls import call_in_order
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.rank_group import RankGroup
from ktrainer.dataparallel.state import group_of
from ktrainer.errors import DataError, ModelError
from ktrainer.steps.variable_broadcast import broadcast_variables as broadcast_named
from ktrainer.steps.variable_placement import finalize_normalization


def broadcast_variables(
    variables: Any, root_rank: int = 0, process_set: ProcessSet | None = None
) -> None:
    """Set variables to the values of rank `root_rank`, bit for bit, on all ranks.

    Call it once the model and the optimizer are built: before the first step, or right after it.

    Args:
        variables: a list of Keras or TensorFlow variables, a model, or a built optimizer; the same
            ones, by shape and type, on every rank.
        root_rank: a rank among all processes, in a process set too.
        process_set: the ranks; default: all.

    Raises:
        ModelError: the model or optimizer is not built.
        DivergenceError: ranks have different variables; it names the first that differs.
    """
    group, found = group_of(process_set), variables_of(variables)
    root = group.position_of(root_rank)
    if group.single or not found:
        return
    operation = f"broadcast_variables from rank {root_rank}"
    if tf.inside_function():
        _broadcast_in_graph(group, found, root, operation)
        return
    named = [(getattr(v, "path", None) or v.name, v) for v in found]
    # The ranks compare their lists of variables there.
    call = call_of(operation, "run")
    carry_out(group.others, call, lambda world: broadcast_named(named, world, root))
    if isinstance(variables, keras.Model):
        finalize_normalization(variables)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """The picklable object of rank `root_rank`, on every rank.

    Args:
        obj: read on the root only.
        root_rank: a rank among all processes, in a process set too.
        session: only None: there are no sessions in TensorFlow 2.
        name: names the call in messages.
        process_set: the ranks; default: all.
    """
    refuse_session(session)
    group = group_of(process_set)
    root = group.position_of(root_rank)
    if group.single:
        return obj
    operation = f"broadcast_object from rank {root_rank}" + (f" {name!r}" if name else "")
    return carry_out(group.others, call_of(operation, "object from a root", (), root), obj)


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """The picklable objects of all ranks, ordered by rank; arguments as for `broadcast_object`."""
    refuse_session(session)
    group = group_of(process_set)
    if group.single:
        return [obj]
    operation = "allgather_object" + (f" {name!r}" if name else "")
    gathered: list[Any] = carry_out(group.others, call_of(operation, "objects"), obj)
    return gathered


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks have called it."""
    group = group_of(process_set)
    if not group.single:
        carry_out(group.others, call_of("barrier", "barrier"), None)


def variables_of(variables: Any) -> list[Any]:
    """The variables in a list, of a model or of an optimizer.

    Raises:
        ModelError: the model or optimizer is not built.
        DataError: something else.
    """
    if isinstance(variables, (keras.Model, keras.optimizers.Optimizer)):
        if not variables.built:
            raise ModelError(
                f"{variables.name!r} has no variables yet, so they cannot be broadcast. Build it "
                "first: a model with model.build(shape) or by calling it, an optimizer with "
                "optimizer.build(model.trainable_variables)."
            )
        return list(variables.variables)
    if not isinstance(variables, Iterable):
        raise DataError(
            f"broadcast_variables takes a list of variables, a model or an optimizer, not "
            f"{type(variables).__name__}."
        )
    found = tf.nest.flatten(list(variables))
    for each in found:
        if not hasattr(each, "assign"):
            raise DataError(
                f"broadcast_variables takes variables, but {type(each).__name__} is none. Give "
                "model.variables and optimizer.variables; send other objects with broadcast_object."
            )
    return found


def _broadcast_in_graph(group: RankGroup, variables: list[Any], root: int, operation: str) -> None:
    def make_call(*arrays: Any) -> Call:
        return call_of(operation, "broadcast", specs_of(arrays), root)

    values = [tf.convert_to_tensor(variable) for variable in variables]
    received = call_in_order(group.others, make_call, values)
    for variable, value in zip(variables, received, strict=True):
        value.set_shape(variable.shape)
        variable.assign(value)


def refuse_session(session: Any) -> None:
    """Refuse a session of TensorFlow 1."""
    if session is not None:
        raise DataError("sessions left TensorFlow with version 2: leave `session` out.")
