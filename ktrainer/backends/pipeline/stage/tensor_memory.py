"""Memory of TensorFlow's tensors: addresses, and arrays over it."""

from __future__ import annotations

import ctypes

import numpy as np
import tensorflow as tf


class _DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h, as far as needed: the first member of a capsule's structure."""

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
    """Address of an eager tensor's bytes, once they are computed; 0 for an empty tensor."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    inner = _DLTensor.from_address(get(capsule, b"dltensor"))
    return int(inner.data or 0) + int(inner.byte_offset)


def array_at(address: int, tensor: tf.Tensor) -> np.ndarray:
    """A flat array over the memory at `address`, which is that of `tensor` and is kept with it."""
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    size = int(np.prod(tensor.shape))
    if not size:
        return np.empty(0, dtype)
    memory = (ctypes.c_byte * (size * dtype.itemsize)).from_address(address)
    memory.tensor = tensor
    return np.frombuffer(memory, dtype)
