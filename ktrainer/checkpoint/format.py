"""One checkpoint on disk: a folder that is there whole, or not at all.

    step-00001234/
        arrays-00001.safetensors ...   numbers, in shards (arrays-p01-00001...: of stage 1)
        state.json                     everything else
        manifest.json                  sizes, checksums, shapes, dtypes; written last

Written under a temporary name: each file is flushed, then the manifest, then the folder, which
is renamed, and its parent flushed. Whoever finds a folder of the final name finds all of it.
Reading checks every size and checksum before it believes anything. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.encoding import decode_json, dtype_named, encode_json, storable
from ktrainer.errors import CheckpointError

# What the manifest says of files, by file name, and of arrays, by array name.
Described = tuple[dict[str, Any], dict[str, Any]]

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
SHARD_BYTES = 256 * 2**20
_MAX_JSON_BYTES = 256 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(json|safetensors)")
_CHUNK = 4 * 2**20


def probe(point: str, path: Path) -> None:
    """Does nothing: marks a point of a save, where a test puts a fault or a record."""


def write_checkpoint(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    write: Callable[[Path, Mapping[str, np.ndarray]], Described] | None = None,
) -> None:
    """Write a checkpoint folder at `path`, atomically; one already there is replaced.

    Args:
        arrays: numbers by name.
        state: whatever else, JSON-able.
        facts: more for the manifest, such as the step.
        write: has `arrays`, and those of other processes, written into a folder; default: this
            process has all of them.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left, and `path` is as before.
        WorldError: another process of `write` is lost; likewise.
    """
    path = Path(path)
    # Other hosts may remember a name that was there before, so they get one that never was.
    number = os.getpid() if write is None else secrets.randbelow(10**12)
    temporary = path.parent / f".{path.name}.tmp-{number}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary, 0o700)
        described = (write or write_arrays)(temporary, arrays)
        _complete(temporary, described, state, dict(facts or {}))
        _put_in_place(temporary, path)
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint {path.name} in {path.parent}: {error}. Checkpoints "
            "written before it are untouched."
        ) from error
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], part: str = "") -> Described:
    """Write `arrays` into `folder`, in flushed shards; `part` makes their names unique."""
    import safetensors.numpy

    files, described = {}, {}
    for number, names in enumerate(_shards(arrays), start=1):
        name = f"arrays-{part}{number:05d}.safetensors"
        stored = {}
        for key in names:
            value = np.asarray(arrays[key])
            stored[key] = storable(value)
            described[key] = {"file": name, "shape": list(value.shape), "dtype": value.dtype.name}
        files[name] = _write_file(folder / name, safetensors.numpy.save(stored))
    return files, described


def _complete(folder: Path, described: Described, state: Any, facts: dict[str, Any]) -> None:
    files = {**described[0], STATE: _write_file(folder / STATE, encode_json(state))}
    manifest = {"format": FORMAT, **facts, "files": files, "arrays": described[1]}
    manifest["checksum"] = _checksum(encode_json(manifest))
    _write_file(folder / MANIFEST, encode_json(manifest))
    flush_folder(folder)


def _shards(arrays: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, value in arrays.items():
        if names and size + value.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += value.nbytes
    if names:
        yield names


def _write_file(path: Path, data: bytes) -> dict[str, Any]:
    probe("before file", path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    probe("after file", path)
    return {"size": len(data), "blake2b": _checksum(data)}


def _put_in_place(temporary: Path, path: Path) -> None:
    old = path.parent / f".{path.name}.old"
    probe("before rename", path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(temporary, path)
    probe("after rename", path)
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Make the names of the files in the folder `path` last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    probe("flushed folder", path)


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked manifest of the checkpoint folder `path`.

    Raises:
        CheckpointError: missing, damaged, or of an unknown format.
    """
    file = Path(path) / MANIFEST
    problem = unfit(file)
    if problem:
        raise CheckpointError(f"{file}: {problem}. This is not a complete checkpoint.")
    try:
        manifest = decode_json(file.read_bytes())
        recorded = manifest.pop("checksum")
        intact = recorded == _checksum(encode_json(manifest))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{file} is damaged: its checksum does not match its content")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.get('format')!r}; this version reads format {FORMAT}"
        )
    return manifest


def verify(path: Path) -> list[str]:
    """Everything that is wrong with the files of the checkpoint `path`; empty when it is good.

    Raises:
        CheckpointError: there is no readable manifest to check against.
    """
    path = Path(path)
    problems = []
    for name, expected in read_manifest(path)["files"].items():
        if not _FILE_NAME.fullmatch(name):
            problems.append(f"{name!r} is not a file name that a checkpoint may hold")
            continue
        file = path / name
        problem = unfit(file, expected["size"])
        if problem is None and _checksum_of(file) != expected["blake2b"]:
            problem = "its content is damaged (checksum)"
        if problem:
            problems.append(f"{file}: {problem}")
    return problems


def unfit(file: Path, size: int | None = None) -> str | None:
    """Why `file`, which should have `size` bytes, must not be opened, if it must not."""
    try:
        status = os.lstat(file)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a plain file"
    if size is not None and status.st_size != size:
        return f"it has {status.st_size} bytes instead of {size}"
    if file.suffix == ".json" and status.st_size > _MAX_JSON_BYTES:
        return f"it is too large ({status.st_size} bytes)"
    return None


def _checksum_of(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, state) of the checkpoint folder `path`, after all of it was checked.

    Raises:
        CheckpointError: listing everything that is wrong; nothing was loaded.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = verify(path)
    if problems:
        raise CheckpointError(
            f"the checkpoint {path} is damaged and was not loaded: " + "; ".join(problems)
        )
    try:
        arrays = _read_arrays(path, manifest["arrays"])
        state = decode_json((path / STATE).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    return arrays, state


def _read_arrays(path: Path, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    arrays: dict[str, np.ndarray] = {}
    by_file: dict[str, list[str]] = {}
    for name, facts in described.items():
        by_file.setdefault(facts["file"], []).append(name)
    for file, names in by_file.items():
        if not _FILE_NAME.fullmatch(file):
            raise ValueError(f"{file!r} is not a file of this checkpoint")
        try:
            with safe_open(path / file, framework="np") as reader:
                for name in names:
                    arrays[name] = _typed(name, reader.get_tensor(name), described[name])
        except SafetensorError as error:
            raise ValueError(f"{path / file}: {error}") from error
    return {name: arrays[name] for name in described}


def _typed(name: str, stored: np.ndarray, facts: Mapping[str, Any]) -> np.ndarray:
    value = (
        stored.view(dtype_named(facts["dtype"]))
        if stored.ndim
        else stored.reshape(1).view(dtype_named(facts["dtype"])).reshape(())
    )
    if list(value.shape) != list(facts["shape"]):
        raise ValueError(f"{name} has shape {list(value.shape)} instead of {facts['shape']}")
    return value


def state_text(path: Path) -> str:
    """The state of the checkpoint `path` as JSON text, for people to read."""
    return json.dumps(decode_json((Path(path) / STATE).read_bytes()), indent=2, default=str)
