"""Floats that cross the wire in 16 bits: which do, and how they are rounded and widened."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_HALVES = (tf.float16, tf.bfloat16)
_WIRES = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


def wire_type(dtype: tf.DType, compression: str) -> tf.DType | None:
    """The 16-bit type in which gradients of `dtype` are sent; None: unchanged.

    Args:
        compression: `"none"`, or `"fp16"` or `"bf16"` for all floats.
    """
    if dtype in _HALVES:
        return dtype
    return _WIRES[compression] if dtype.is_floating else None


def converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    """An array as another type of float, rounded to nearest; what is too large is infinite.

    By TensorFlow, which takes a tenth of NumPy's time for float16. Do not write to the result.
    """
    if array.dtype == dtype:
        return array
    with tf.device("CPU:0"):
        return np.asarray(tf.cast(tf.convert_to_tensor(array), dtype))
