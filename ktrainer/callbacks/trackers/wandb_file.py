"""The rows in a file of an offline run of Weights & Biases, whose library cannot read it back.

The file is a log as LevelDB has it, after a header of 7 bytes: blocks of 32 KiB with records of
(checksum, length, kind), each record a whole message of `wandb.proto`, or a part of one.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<IHB")
_BLOCK, _MAGIC = 32768, b":W&B\xe1\xbe\x00"
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def rows_in(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of each row, up to where a killed process has left the file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for message in _messages(file.read_bytes()):
        record = Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            items = record.history.item
            named = {item.key or ".".join(item.nested_key): item.value_json for item in items}
            yield record.history.step.num, {key: json.loads(text) for key, text in named.items()}


def _messages(data: bytes) -> Iterator[bytes]:
    """The complete messages; nothing after the first record that is damaged or cut off."""
    if not data.startswith(_MAGIC):
        return
    at, message = len(_MAGIC), b""
    while True:
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left  # padding
        head = data[at : at + _HEAD.size]
        if len(head) < _HEAD.size:
            return
        checksum, length, kind = _HEAD.unpack(head)
        at += _HEAD.size
        part = data[at : at + length]
        at += length
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        message = part if kind in (_WHOLE, _FIRST) else message + part
        if kind in (_WHOLE, _LAST):
            yield message
