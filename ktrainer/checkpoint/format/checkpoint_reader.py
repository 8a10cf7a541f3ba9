"""Read a checkpoint: all of it is verified before any of it is used.

Arrays are read-only views of the files, so restoring them takes no memory but that of the
variables. Do not keep such a view: it holds its file open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ktrainer.checkpoint.format.checkpoint_folder import (
    CHECKSUM,
    FILE_NAME,
    FORMAT,
    MANIFEST,
    STATE,
    invalid_file,
)
from ktrainer.checkpoint.format.safetensors_file import open_shard
from ktrainer.checkpoint.format.value_encoding import (
    decode_json,
    dtype_named,
    encode_json,
    is_count,
    stored_as,
)
from ktrainer.errors import CheckpointError

Arrays = dict[str, np.ndarray]

_CHUNK_BYTES = 4 * 2**20


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, state) of the checkpoint folder `path`, verified.

    Raises:
        CheckpointError: with all problems; nothing was loaded.
    """
    path = Path(path)
    manifest = read_manifest(path)
    arrays, problems = _check(path, manifest)
    if problems:
        raise CheckpointError(
            f"the checkpoint {path} is damaged and was not loaded: " + "; ".join(problems)
        )
    try:
        return arrays, read_state(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error


def verify(path: str | os.PathLike[str]) -> list[str]:
    """All problems of the files and arrays of `path`; empty if it is good.

    Raises:
        CheckpointError: there is no readable manifest to check against.
    """
    path = Path(path)
    return _check(path, read_manifest(path))[1]


def read_state(path: Path) -> Any:
    """The content of `state.json` of the checkpoint `path`, unverified."""
    return decode_json((Path(path) / STATE).read_bytes())


def read_manifest(path: Path) -> dict[str, Any]:
    """The verified manifest of the checkpoint folder `path`.

    Raises:
        CheckpointError: missing, damaged, or of an unknown format.
    """
    file = Path(path) / MANIFEST
    problem = invalid_file(file)
    if problem:
        raise CheckpointError(f"{file}: {problem}. This is not a complete checkpoint.")
    try:
        manifest = json.loads(file.read_bytes().decode())  # it has no arrays
        recorded = manifest.pop("checksum")
        intact = recorded.get(CHECKSUM) == blake3(encode_json(manifest)).hexdigest()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{file} is damaged: its checksum does not match its content")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.get('format')!r}; this version reads format {FORMAT}"
        )
    if not all(isinstance(manifest.get(part), dict) for part in ("files", "arrays")):
        raise CheckpointError(f"{file} is damaged: it does not list files and arrays")
    return manifest


def form_problem(manifest: Mapping[str, Any]) -> str | None:
    """The problem of a manifest with a valid checksum but another form; None if there is none."""
    for part, keys in (("files", ("size",)), ("arrays", ("file", "shape", "dtype"))):
        for name, facts in manifest[part].items():
            missing = [key for key in keys if not isinstance(facts, dict) or key not in facts]
            if missing:
                return f"{name!r} among its {part} has no {missing[0]}"
    for name, facts in manifest["files"].items():
        if not is_count(facts["size"]):
            return f"{name!r} among its files has no valid size"
    for part in ("metric", "versions"):
        if not isinstance(manifest.get(part), (dict, type(None))):
            return f"its {part!r} is no table"
    return None


def sizes_problem(path: Path, files: Mapping[str, Any]) -> str | None:
    """The first problem of the names and sizes of the files of `path`: a quick check."""
    for name, facts in files.items():
        problem = _place_problem(path, name, facts)
        if problem:
            return problem
    return None


def _check(path: Path, manifest: Mapping[str, Any]) -> tuple[Arrays, list[str]]:
    """The arrays of a checkpoint, and all its problems."""
    problems, bad = [], set()
    for name, facts in manifest["files"].items():
        problem = _file_problem(path, name, facts)
        if problem:
            bad.add(name)
            problems.append(problem)
    if STATE not in manifest["files"]:
        problems.append(f"{STATE} is not among its files")
    arrays, more = _open_arrays(path, manifest, bad)
    return arrays, problems + more


def _place_problem(path: Path, name: str, facts: Any) -> str | None:
    if not FILE_NAME.fullmatch(name):
        return f"{name!r} is not a file name that a checkpoint may hold"
    size = facts.get("size") if isinstance(facts, dict) else None
    if not is_count(size):
        return f"{path / name}: the manifest does not tell its size"
    problem = invalid_file(path / name, size)
    return f"{path / name}: {problem}" if problem else None


def _file_problem(path: Path, name: str, facts: Any) -> str | None:
    problem = _place_problem(path, name, facts)
    if problem:
        return problem
    problem = _content_problem(path / name, facts)
    return f"{path / name}: {problem}" if problem else None


def _content_problem(file: Path, facts: Mapping[str, Any]) -> str | None:
    """The problem of the content of `file` against the manifest; None if there is none."""
    if CHECKSUM not in facts:
        return f"the manifest has no {CHECKSUM} checksum for it"
    digest = blake3()
    try:
        with open(file, "rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None if digest.hexdigest() == facts[CHECKSUM] else "its content is damaged (checksum)"


def _open_arrays(
    path: Path, manifest: Mapping[str, Any], bad: set[str]
) -> tuple[Arrays, list[str]]:
    """The arrays in good files, and the problems of the arrays."""
    arrays: Arrays = {}
    problems: list[str] = []
    opened: dict[str, Arrays] = {}
    for file in manifest["files"]:
        if file.endswith(".safetensors") and file not in bad:
            try:
                opened[file] = open_shard(path / file)
            except (OSError, ValueError) as error:
                bad.add(file)
                problems.append(f"{path / file} cannot be read: {error}")
    for name, facts in manifest["arrays"].items():
        file = facts.get("file") if isinstance(facts, dict) else None
        if isinstance(file, str) and file in bad:
            continue  # reported already
        try:
            if not isinstance(file, str) or file not in opened:
                raise ValueError(f"{name} is in {file!r}, which is not a file of this checkpoint")
            arrays[name] = _typed(name, opened[file].get(name), facts)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(str(error))
    return arrays, problems


def _typed(name: str, stored: np.ndarray | None, facts: Mapping[str, Any]) -> np.ndarray:
    if stored is None:
        raise ValueError(f"{name} is not in {facts['file']}")
    dtype = dtype_named(facts["dtype"])
    kind, more = stored_as(dtype)
    if list(stored.shape) != facts["shape"] + more:
        raise ValueError(
            f"{name} has shape {list(stored.shape)} instead of {facts['shape'] + more}"
        )
    if stored.dtype != kind:
        raise ValueError(f"{name} has values of {stored.dtype} instead of {dtype.name}")
    return stored.reshape(-1).view(dtype).reshape(facts["shape"])
