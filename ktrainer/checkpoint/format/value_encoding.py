"""Encode values that JSON and safetensors cannot represent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

# Stored as unsigned integers of the same width: safetensors' NumPy side cannot read them back.
_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
# Names of dtypes, and what safetensors calls them.
CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_PAIRS = "complex128"  # stored as pairs of float64: safetensors has no such dtype
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def storable(value: np.ndarray) -> np.ndarray:
    """`value`, contiguous, in a dtype of safetensors with the same bits; see `stored_as`.

    Raises:
        ValueError: the dtype is not numeric.
    """
    value = np.ascontiguousarray(value).reshape(np.shape(value))
    if value.dtype.name in CODES:
        return value.astype(value.dtype.name, copy=False)  # native byte order
    if value.dtype.name in _ML_DTYPES:
        flat = value.reshape(-1).view(_WORDS[value.dtype.itemsize])
        return flat.reshape(value.shape)
    if value.dtype.name == _PAIRS:
        native = value.astype(_PAIRS, copy=False)
        return native.reshape(-1).view(np.float64).reshape(*value.shape, 2)
    raise ValueError(f"values of dtype {value.dtype} cannot be kept in a checkpoint")


def stored_as(dtype: np.dtype) -> tuple[np.dtype, list[int]]:
    """The dtype that `storable` gives values of `dtype`, and the lengths of axes that it adds."""
    if dtype.name == _PAIRS:
        return np.dtype(np.float64), [2]
    return (np.dtype(_WORDS[dtype.itemsize]) if dtype.name in _ML_DTYPES else dtype), []


def dtype_named(name: str) -> np.dtype:
    """The dtype of that name, those of ml_dtypes included.

    Raises:
        ValueError: a checkpoint cannot hold that dtype.
    """
    if name in CODES or name == _PAIRS:
        return np.dtype(name)
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    raise ValueError(f"a checkpoint holds no values of dtype {name!r}")


def is_count(value: Any) -> bool:
    """Whether a value from JSON is a possible count, of bytes for example."""
    return type(value) is int and 0 <= value < 2**63


def encode_json(value: Any) -> bytes:
    """JSON text in UTF-8: keys in order, exact floats, NaN allowed, arrays as nested lists.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot hold it.
    """
    return json.dumps(_keys_kept(value), default=_plain).encode()


def decode_json(data: bytes) -> Any:
    """The inverse of `encode_json`.

    Raises:
        ValueError, RecursionError: it is not such a text.
    """
    return json.loads(data.decode(), object_hook=_special)


def _keys_kept(value: Any) -> Any:
    """`value` with dicts of numbers, such as `{3: 1}`, as items: JSON makes strings of all keys."""
    if isinstance(value, (list, tuple)):
        return [_keys_kept(each) for each in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _keys_kept(each) for key, each in value.items()}
    for key in value:
        if not isinstance(key, (str, int, float, np.number, type(None))):
            raise TypeError(f"keys must be strings, numbers or None, not {key!r}")
    return {"__items__": [[key, _keys_kept(each)] for key, each in value.items()]}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):  # arrays and tensors
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"values of dtype {array.dtype} cannot be kept in a checkpoint")
        return {"__array__": array.tolist(), "dtype": array.dtype.name}
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be kept in a checkpoint")


def _special(item: dict[str, Any]) -> Any:
    try:
        if set(item) == {"__array__", "dtype"}:
            return np.array(item["__array__"], dtype_named(item["dtype"]))
        if set(item) == {"__items__"}:
            return dict(item["__items__"])
    except (TypeError, OverflowError) as error:
        raise ValueError(f"an array, or a dict, is described wrongly: {error}") from error
    return item
