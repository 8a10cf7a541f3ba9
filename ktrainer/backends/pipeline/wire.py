"""The memory that tensors travel from and into: the host's, or that of the tensors themselves.

An MPI that is CUDA-aware takes addresses of GPU memory and moves it without the host. TensorFlow
tells such an address through DLPack, and waits for the device before it does, so what is sent has
been computed, and nothing still uses the memory that is received into.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ktrainer.world import chunks


@dataclass
class Parcel:
    """A tensor under way.

    Attributes:
        pieces: its bytes, for MPI; each of a length that one message can have.
        owner: what holds the memory; kept until it has arrived.
    """

    pieces: list[Any]
    owner: Any


class Wire(Protocol):
    """How tensors and memory that MPI can use become one another."""

    def pack(self, tensor: tf.Tensor) -> Parcel:
        """A tensor, to send."""

    def make(self, spec: tf.TensorSpec) -> Parcel:
        """Room for a tensor of a static shape, to receive."""

    def unpack(self, parcel: Parcel) -> tf.Tensor:
        """The tensor that has been received."""


class HostWire:
    """Through arrays in host memory."""

    def pack(self, tensor: tf.Tensor) -> Parcel:
        # No copy of what is in host memory: the parcel keeps it, and TensorFlow writes nothing to
        # memory that somebody else has.
        return self._parcel(np.ascontiguousarray(tensor if tensor.ndim else tensor.numpy()))

    def make(self, spec: tf.TensorSpec) -> Parcel:
        return self._parcel(np.empty(tuple(spec.shape), spec.dtype.as_numpy_dtype))

    def unpack(self, parcel: Parcel) -> tf.Tensor:
        return tf.convert_to_tensor(parcel.owner)

    def _parcel(self, array: np.ndarray) -> Parcel:
        # As bytes: MPI need not know the type.
        return Parcel(chunks.pieces(array.reshape(-1).view(np.uint8)), array)


class DeviceWire:
    """From and into the memory where TensorFlow has the tensors, be it a GPU's or the host's."""

    def pack(self, tensor: tf.Tensor) -> Parcel:
        return self._parcel(tensor)

    def make(self, spec: tf.TensorSpec) -> Parcel:
        # Not `tf.zeros`, which may hand out memory that others read too.
        shape = tf.constant(spec.shape.as_list(), tf.int32)
        return self._parcel(tf.raw_ops.Empty(shape=shape, dtype=spec.dtype))

    def unpack(self, parcel: Parcel) -> tf.Tensor:
        return parcel.owner

    def _parcel(self, tensor: tf.Tensor) -> Parcel:
        from mpi4py import MPI

        size = tensor.shape.num_elements() * tensor.dtype.size
        start = address_of(tensor)
        spans = chunks.spans(size)
        pieces = [[MPI.buffer.fromaddress(start + a, b - a), MPI.BYTE] for a, b in spans]
        return Parcel(pieces, tensor)


def make_wire() -> Wire:
    """Device memory where there is a GPU and MPI can use its memory, else host memory."""
    if tf.config.list_logical_devices("GPU") and mpi_is_cuda_aware():
        return DeviceWire()
    return HostWire()


def mpi_is_cuda_aware() -> bool:
    """Whether the MPI in this process takes addresses of GPU memory.

    Open MPI and MPICH say so themselves: `MPIX_Query_cuda_support` of their manuals.
    """
    from mpi4py import MPI

    libraries: Sequence[str | None] = (None, MPI.__file__)  # where the symbol may be in reach
    for library in libraries:
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h, as far as needed; it comes first in what a capsule points to."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


def address_of(tensor: tf.Tensor) -> int:
    """Where an eager tensor's bytes begin, once its device has computed them; 0 without any."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    inner = _DLTensor.from_address(get(capsule, b"dltensor"))
    return int(inner.data or 0) + int(inner.byte_offset)
