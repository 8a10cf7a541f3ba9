"""Safetensors files: written without a second copy of the arrays, read as a memory map.

    8 bytes    length of the header, little endian
    header     JSON: {name: {dtype, shape, data_offsets: [first byte, end]}}, padded with blanks
    data       the arrays, one after the other

Format: https://huggingface.co/docs/safetensors. The library's NumPy functions copy a whole file to
write it, and each array to read it; a checksum would be one more pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.format.value_encoding import CODES, is_count, storable

MAX_HEADER_BYTES = 32 * 2**20  # parsed JSON takes up to twenty times as much memory
_ALIGNMENT = 8
_MOST_DIMENSIONS = 64  # of any NumPy array


def encode(arrays: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """The content of a safetensors file, in pieces that share the memory of `arrays`.

    Raises:
        ValueError: values that are not numbers, or too many arrays for one header.
    """
    stored = {name: _storable(name, value) for name, value in arrays.items()}
    # Wide elements first: then all are aligned without gaps, which the format forbids.
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    header, at = {}, 0
    for name in order:
        value = stored[name]
        header[name] = {
            "dtype": CODES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(stored)} arrays are too many for one file")
    pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    pieces += [stored[n].reshape(-1).view(np.uint8).data for n in order if stored[n].nbytes]
    return pieces


def _storable(name: str, value: np.ndarray) -> np.ndarray:
    try:
        return storable(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def open_shard(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, by name: read-only views of the file.

    Only the header is read.

    Raises:
        ValueError: the header is damaged, or contradicts the size of the file.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header cannot have {length} bytes: the file has {size}")
        header = _header(stream.read(length))
    start = 8 + length
    data = np.zeros(0, np.uint8)
    if size > start:
        data = np.asarray(np.memmap(file, np.uint8, "r", offset=start, shape=(size - start,)))
    return {name: _view(name, facts, data) for name, facts in header.items()}


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of arrays")
    header.pop("__metadata__", None)
    return header


def _view(name: str, facts: Any, data: np.ndarray) -> np.ndarray:
    try:
        dtype, shape = _DTYPES[facts["dtype"]], facts["shape"]
        start, end = facts["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is described wrongly: {facts!r:.200}") from error
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} is described wrongly: {facts!r:.200}")
    if not all(map(is_count, (*shape, start, end))):
        raise ValueError(f"{name} has an impossible shape or offset: {facts!r:.200}")
    if not start <= end <= data.size or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{name}, {shape} of {dtype}, cannot be bytes {start} to {end} of {data.size}"
        )
    try:
        return data[start:end].view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} has the impossible shape {shape}") from error


_DTYPES = {code: np.dtype(name) for name, code in CODES.items()}
