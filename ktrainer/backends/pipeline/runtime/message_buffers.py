"""Message buffers: tensors as memory that MPI sends from and receives into.

A CUDA-aware MPI takes addresses of GPU memory and moves it without the host. TensorFlow gives such
an address through DLPack, and synchronizes the device first: tensors that are sent are computed,
and memory that is received into is not in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.stage.tensor_memory import address_of
from ktrainer.distributed import mpi_chunks


@dataclass
class Message:
    """A tensor that is being sent or received.

    Attributes:
        pieces: its bytes, for MPI; each of a length that one message can have.
        owner: the object that owns the memory; kept until the message is complete.
    """

    pieces: list[Any]
    owner: Any


class MessageBuffers(Protocol):
    """Conversion of tensors to and from memory that MPI can use."""

    def pack(self, tensor: tf.Tensor) -> Message:
        """Message of a tensor to send."""

    def allocate(self, spec: tf.TensorSpec) -> Message:
        """Message to receive a tensor of a static shape."""

    def unpack(self, message: Message) -> tf.Tensor:
        """Tensor of a received message."""


class HostBuffers:
    """Buffers in host memory."""

    def pack(self, tensor: tf.Tensor) -> Message:
        # No copy of what is in host memory: the message keeps a reference, and TensorFlow does not
        # overwrite memory that is referenced.
        return self._message(np.ascontiguousarray(tensor if tensor.ndim else tensor.numpy()))

    def allocate(self, spec: tf.TensorSpec) -> Message:
        return self._message(np.empty(tuple(spec.shape), spec.dtype.as_numpy_dtype))

    def unpack(self, message: Message) -> tf.Tensor:
        return tf.convert_to_tensor(message.owner)

    def _message(self, array: np.ndarray) -> Message:
        # As bytes: MPI need not know the type.
        return Message(mpi_chunks.pieces(array.reshape(-1).view(np.uint8)), array)


class DeviceBuffers:
    """The memory of the tensors themselves, on a GPU or on the host."""

    def pack(self, tensor: tf.Tensor) -> Message:
        return self._message(tensor)

    def allocate(self, spec: tf.TensorSpec) -> Message:
        # Not `tf.zeros`, which may return memory that other tensors share.
        shape = tf.constant(spec.shape.as_list(), tf.int32)
        return self._message(tf.raw_ops.Empty(shape=shape, dtype=spec.dtype))

    def unpack(self, message: Message) -> tf.Tensor:
        return message.owner

    def _message(self, tensor: tf.Tensor) -> Message:
        from mpi4py import MPI

        size = tensor.shape.num_elements() * tensor.dtype.size
        start = address_of(tensor)
        spans = mpi_chunks.spans(size)
        pieces = [[MPI.buffer.fromaddress(start + a, b - a), MPI.BYTE] for a, b in spans]
        return Message(pieces, tensor)


def make_buffers() -> MessageBuffers:
    """Device buffers if there is a GPU and MPI is CUDA-aware, else host buffers."""
    if tf.config.list_logical_devices("GPU") and mpi_is_cuda_aware():
        return DeviceBuffers()
    return HostBuffers()


def mpi_is_cuda_aware() -> bool:
    """Return whether the MPI in this process takes addresses of GPU memory.

    Open MPI and MPICH answer `MPIX_Query_cuda_support` of their manuals.
    """
    from mpi4py import MPI

    libraries: Sequence[str | None] = (None, MPI.__file__)  # where the symbol may be in reach
    for library in libraries:
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False
