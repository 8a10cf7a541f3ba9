"""Write one checkpoint: a folder that is complete, or absent.

    step-00001234/
        arrays-00001.safetensors ...   numbers, in shards (arrays-p01-00001...: of stage 1)
        state.json                     everything else
        model.json                     Keras' description of the model, if there is one
        manifest.json                  sizes, checksums, shapes, dtypes; written last

Written under a temporary name: each file is flushed, then the manifest, then the folder, which is
renamed, and its parent flushed. A folder with the final name is therefore always complete.
`checkpoint_reader` verifies all of it before any of it is used. Nothing is pickled.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ktrainer.checkpoint.format import safetensors_file
from ktrainer.checkpoint.format.value_encoding import encode_json
from ktrainer.errors import CheckpointError

# The manifest's tables: of files, by file name, and of arrays, by array name.
Described = tuple[dict[str, Any], dict[str, Any]]

FORMAT = 2
# A third of the time of SHA-256 on a processor with instructions for that, a tenth elsewhere.
CHECKSUM = "blake3"
MANIFEST, STATE, MODEL = "manifest.json", "state.json", "model.json"
SHARD_BYTES = 256 * 2**20
# JSON takes up to twenty times as much memory as text.
MOST_BYTES = {MANIFEST: 32 * 2**20, STATE: 64 * 2**20, MODEL: 32 * 2**20}
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(json|safetensors)")


def fault_point(point: str, path: Path) -> None:
    """Mark a point of a save; does nothing. Tests replace it to inject faults or to record."""


@contextmanager
def temporary_checkpoint(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the checkpoint `path`, removed after an error.

    Args:
        temporary: a folder of `make_temporary`; None: make it.

    Raises:
        CheckpointError: for any error inside of an expected type.
    """
    try:
        temporary = temporary or make_temporary(path)
        yield temporary
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        remove_temporary(temporary)
        raise _cannot_write(path, error) from error
    except Exception:
        remove_temporary(temporary)
        raise


def make_temporary(path: Path) -> Path:
    """Make the temporary folder of the checkpoint `path`, and those above that are missing.

    Raises:
        CheckpointError: they cannot be made.
    """
    # A new name each time: other hosts may have cached an old one.
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
        flush_folder(folder.parent)  # else a crash could lose the folder with its content


def remove_temporary(temporary: Path | None) -> None:
    """Remove a temporary folder with its files."""
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write the checkpoint {path.name} in {path.parent}: {error}. Checkpoints "
        "written before it are untouched."
    )


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], part: str = "") -> Described:
    """Write `arrays` into `folder`, in flushed shards; their names contain `part`."""
    files, described = {}, {}
    for number, names in enumerate(_shards(arrays), start=1):
        name = f"arrays-{part}{number:05d}.safetensors"
        chosen = {key: np.asarray(arrays[key]) for key in names}
        for key, value in chosen.items():
            described[key] = {"file": name, "shape": list(value.shape), "dtype": value.dtype.name}
        files[name] = _write_file(folder / name, safetensors_file.encode(chosen))
    return files, described


def finish_checkpoint(
    temporary: Path,
    path: Path,
    described: Described,
    state: Mapping[str, Any] | bytes,
    facts: Mapping[str, Any] | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> None:
    """Add state, texts and manifest to the arrays, and rename the folder to `path`."""
    files = dict(described[0])
    text = state if isinstance(state, bytes) else encode_json(state)
    for name, content in {STATE: text, **(texts or {})}.items():
        files[name] = _write_file(temporary / name, [content])
    manifest = {"format": FORMAT, **(facts or {}), "files": files, "arrays": described[1]}
    manifest["checksum"] = {CHECKSUM: blake3(encode_json(manifest)).hexdigest()}
    _write_file(temporary / MANIFEST, [encode_json(manifest)])
    flush_folder(temporary)
    _publish(temporary, path)


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
            f"{path.name} would have {size} bytes, more than the limit for reading "
            f"({MOST_BYTES[path.name]}); the `state_dict` of callbacks must be smaller"
        )
    fault_point("before file", path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file, _checksum_of(pieces) as digest:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    fault_point("after file", path)
    return {"size": size, CHECKSUM: digest.hexdigest()}


@contextmanager
def _checksum_of(pieces: list[Any]) -> Iterator[blake3]:
    """The checksum of `pieces`, complete when the context ends.

    A thread computes it: that takes as long as writing, and flushing leaves a processor idle.
    """
    digest, errors = blake3(), list[BaseException]()

    def compute() -> None:
        try:
            for piece in pieces:
                digest.update(piece)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compute, name="ktrainer-checksum")
    try:
        thread.start()
    except RuntimeError:  # no more threads can be started, as while Python ends
        compute()
    try:
        yield digest
    finally:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def _publish(temporary: Path, path: Path) -> None:
    old = path.parent / f".{path.name}.old"
    fault_point("before rename", path)
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        fault_point("between renames", path)
    try:
        os.rename(temporary, path)
    except OSError:
        if replaces:
            os.rename(old, path)
        raise
    fault_point("after rename", path)
    flush_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Flush the entries of the folder `path` to the disk, where its file system can do that."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # as some network file systems say
            raise
    finally:
        os.close(handle)
    fault_point("flushed folder", path)


def invalid_file(file: Path, size: int | None = None) -> str | None:
    """The reason not to open `file`, which should have `size` bytes; None if there is none."""
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
