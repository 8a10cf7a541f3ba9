"""Checkpoints as an attacker, or a broken disk, leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.checkpoint.format.value_encoding import decode_json, encode_json


def flip(file: Path, at: int | None = None) -> None:
    """Change one bit of a file, by default in its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    """Take away the last byte of a file."""
    file.write_bytes(file.read_bytes()[:-1])


def _blake3(text: bytes) -> Any:
    return {"blake3": blake3(text).hexdigest()}


def forge(
    path: Path, change: Callable[[dict], Any], checksum_of: Callable[[bytes], Any] = _blake3
) -> None:
    """Change the manifest and make its checksum right again."""
    manifest = decode_json((path / MANIFEST).read_bytes())
    manifest.pop("checksum")
    change(manifest)
    manifest["checksum"] = checksum_of(encode_json(manifest))
    (path / MANIFEST).write_bytes(encode_json(manifest))


def replace(path: Path, name: str, content: bytes) -> None:
    """Put other content into a file of the checkpoint `path`, with the right checksums."""
    (path / name).write_bytes(content)
    facts = {"size": len(content), "blake3": blake3(content).hexdigest()}
    forge(path, lambda manifest: manifest["files"].update({name: facts}))
