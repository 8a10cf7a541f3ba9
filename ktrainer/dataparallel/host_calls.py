"""Calls of Python functions in host memory, eagerly and inside of compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from ktrainer.dataparallel.calls import Call
from ktrainer.dataparallel.handlers import carry_out
from ktrainer.distributed.collectives import InOrder
from ktrainer.errors import DataError, ModelError

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel
    from ktrainer.dataparallel.rank_group import RankGroup


def in_order(
    channel: Channel,
    host: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """The outputs of `host(*arrays)`, which runs after the earlier calls of this channel.

    Args:
        host: takes and returns NumPy arrays.
        inputs: its inputs.
        dtypes: the types of its outputs.
    """
    refuse_xla()
    return InOrder(channel.name).on_host(host, inputs, dtypes)


def call_in_order(
    channel: Channel,
    make_call: Callable[..., Call],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """The outputs of a collective call on tensors.

    Args:
        make_call: gives the call for the arrays of `inputs`.
        dtypes: the types of its outputs; default: those of the inputs, one for each.
    """

    def host(*arrays: np.ndarray) -> list[np.ndarray]:
        return carry_out(channel, make_call(*arrays), list(arrays))

    return in_order(channel, host, inputs, dtypes or [each.dtype for each in inputs])


def ranks_now(group: RankGroup) -> tuple[Any, Any]:
    """This rank's number in a group, and their number; with healing compiled functions, which may
    outlive a change of the ranks, read them each time they run."""
    if tf.executing_eagerly() or not group.world.heals:
        return group.rank, group.size

    def read() -> np.ndarray:
        return np.array([group.rank, group.size], np.int32)

    found = tf.ensure_shape(tf.numpy_function(read, [], tf.int32, stateful=True), [2])
    return found[0], found[1]


def refuse_xla() -> None:
    """Refuse to communicate where XLA compiles.

    Raises:
        ModelError: a function with `jit_compile=True` is being traced.
    """
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        ops.get_default_graph()
    ):
        raise ModelError(
            "a collective operation was called in a function that XLA compiles, in which nothing "
            "can be communicated. Use jit_compile=False: in tf.function, or in model.compile."
        )


def as_tensor(value: Any, what: str) -> tf.Tensor:
    """`value` as a tensor of numbers.

    Raises:
        DataError: it has strings, booleans or another type that cannot be communicated so.
    """
    tensor = tf.convert_to_tensor(value)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise DataError(
            f"{what} takes floats and integers, not {tensor.dtype.name}. Cast booleans to "
            "integers; send strings and other objects with broadcast_object or allgather_object."
        )
    return tensor
