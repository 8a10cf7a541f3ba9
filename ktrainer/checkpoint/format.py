"""One checkpoint on disk: a folder that is there whole, or not at all.

    step-00001234/
        arrays-00001.safetensors ...   numbers, in shards (arrays-p01-00001...: of stage 1)
        state.json                     everything else
        model.json                     what Keras needs to make the model, where it can tell
        manifest.json                  sizes, checksums, shapes, dtypes; written last

Written under a temporary name: each file is flushed, then the manifest, then the folder, which
is renamed, and its parent flushed. Whoever finds a folder of the final name finds all of it.
`ktrainer.checkpoint.reading` checks all of it before it believes anything. Nothing is pickled.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint import checksums, shards
from ktrainer.checkpoint.encoding import encode_json
from ktrainer.errors import CheckpointError

# What the manifest says of files, by file name, and of arrays, by array name.
Described = tuple[dict[str, Any], dict[str, Any]]

FORMAT = 2  # 1 had other checksums
MANIFEST, STATE, MODEL = "manifest.json", "state.json", "model.json"
SHARD_BYTES = 256 * 2**20
# JSON takes up to twenty times as much memory as text.
MOST_BYTES = {MANIFEST: 32 * 2**20, STATE: 64 * 2**20, MODEL: 32 * 2**20}
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(json|safetensors)")


def probe(point: str, path: Path) -> None:
    """Does nothing: marks a point of a save, where a test puts a fault or a record."""


def write_checkpoint(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    state: Mapping[str, Any] | bytes,
    facts: Mapping[str, Any] | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint folder at `path`, atomically; one already there is replaced.

    Args:
        arrays: numbers by name.
        state: whatever else, JSON-able, or as JSON already.
        facts: more for the manifest, such as the step.
        texts: more files, by name, such as `model.json`.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left, and `path` is as before.
    """
    with writing(Path(path)) as temporary:
        described = write_arrays(temporary, arrays)
        complete(temporary, path, described, state, facts, texts)


@contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the checkpoint `path`, which goes if it does not get complete.

    Args:
        temporary: what `begin` made; None: make it.

    Raises:
        CheckpointError: in place of what went wrong inside, as far as it is expected.
    """
    try:
        temporary = temporary or begin(path)
        yield temporary
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        abandon(temporary)
        raise _cannot_write(path, error) from error
    except Exception:
        abandon(temporary)
        raise


def begin(path: Path) -> Path:
    """Make the temporary folder of the checkpoint `path`, and those above that are missing.

    Raises:
        CheckpointError: they cannot be made.
    """
    # A name that never was: other hosts may remember one that was there before.
    temporary = path.parent / f".{path.name}.tmp-{secrets.randbelow(10**12)}"
    try:
        make_private(path.parent)
        os.mkdir(temporary, 0o700)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return temporary


def make_private(folder: Path) -> None:
    """Make `folder`, and those above it that are missing, for their owner alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        flush_folder(folder.parent)  # what is in it does not last longer than its name


def abandon(temporary: Path | None) -> None:
    """Remove what was written so far."""
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint {path.name} in {path.parent}: {error}. Checkpoints "
        "written before it are untouched."
    )


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], part: str = "") -> Described:
    """Write `arrays` into `folder`, in flushed shards; `part` makes their names unique."""
    files, described = {}, {}
    for number, names in enumerate(_shards(arrays), start=1):
        name = f"arrays-{part}{number:05d}.safetensors"
        chosen = {key: np.asarray(arrays[key]) for key in names}
        for key, value in chosen.items():
            described[key] = {"file": name, "shape": list(value.shape), "dtype": value.dtype.name}
        files[name] = _write_file(folder / name, shards.encode(chosen))
    return files, described


def complete(
    temporary: Path,
    path: Path,
    described: Described,
    state: Mapping[str, Any] | bytes,
    facts: Mapping[str, Any] | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> None:
    """Add all but the arrays, which are written already, and give the folder its name."""
    files = dict(described[0])
    text = state if isinstance(state, bytes) else encode_json(state)
    for name, content in {STATE: text, **(texts or {})}.items():
        files[name] = _write_file(temporary / name, [content])
    manifest = {"format": FORMAT, **(facts or {}), "files": files, "arrays": described[1]}
    manifest["checksum"] = {checksums.NAME: checksums.checksum(encode_json(manifest))}
    _write_file(temporary / MANIFEST, [encode_json(manifest)])
    flush_folder(temporary)
    _put_in_place(temporary, path)


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


def _write_file(path: Path, pieces: list[Any]) -> dict[str, Any]:
    """Write and flush a new file; returns its size and checksum."""
    size = sum(len(piece) for piece in pieces)
    if size > MOST_BYTES.get(path.name, size):
        raise ValueError(
            f"{path.name} would have {size} bytes, more than can be read again "
            f"({MOST_BYTES[path.name]}); what callbacks keep in `state_dict` must be smaller"
        )
    digest = checksums.hasher()
    probe("before file", path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    probe("after file", path)
    return {"size": size, checksums.NAME: digest.hexdigest()}


def _put_in_place(temporary: Path, path: Path) -> None:
    old = path.parent / f".{path.name}.old"
    probe("before rename", path)
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        probe("between renames", path)
    try:
        os.rename(temporary, path)
    except OSError:
        if replaces:
            os.rename(old, path)
        raise
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
    if file.suffix == ".json" and status.st_size > MOST_BYTES.get(file.name, 0):
        return f"it is too large ({status.st_size} bytes)"
    return None
