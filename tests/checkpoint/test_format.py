"""A checkpoint on disk is there whole, or not at all, and is checked before it is believed."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ktrainer.checkpoint.format.checkpoint_folder as format_module
from ktrainer.checkpoint import read_checkpoint, verify
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.errors import CheckpointError
from tests.checkpoint.whole import write_checkpoint
from tests.faults.forging import forge

ARRAYS = {
    "model/kernel": np.arange(12, dtype="float32").reshape(3, 4) / 7,
    "model/half": np.float16([1.5, -2]),
    "model/brain": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "model/eight": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "optimizer/0/0:iteration": np.int64(7),
    "model/scalar": np.array(2.5, ml_dtypes.bfloat16),
    "model/wide": np.array([[1.5 + 0.1j, -2j], [np.nan, 1e-300]]),
    "model/one": np.array(0.1 + 0.2j),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), "float64"),
    "seed": np.uint32([1, 2]),
    "transposed": np.arange(6.0).reshape(2, 3).T,
}
STATE = {
    "progress": {"step": 7, "elapsed": 0.1 + 0.2},
    "history": {"loss": [float("nan"), 1.5], "vector": [np.float32([1, 2])]},
    "best": None,
}


def write(path: Path, **facts: Any) -> Path:
    write_checkpoint(path, ARRAYS, STATE, facts)
    return path


def test_round_trip_is_exact_to_the_bit(tmp_path) -> None:
    arrays, state = read_checkpoint(write(tmp_path / "step-00000007"))
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == np.asarray(array).dtype
        assert arrays[name].shape == np.shape(array)
        assert arrays[name].tobytes() == np.asarray(array).tobytes()
    assert state["progress"] == STATE["progress"]
    assert np.isnan(state["history"]["loss"][0])
    np.testing.assert_array_equal(state["history"]["vector"][0], np.float32([1, 2]))


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    words = {"model/kernel": np.ones(2), "model/words": np.array([b"red"], object)}
    with pytest.raises(CheckpointError, match="model/words: values of dtype object cannot be kept"):
        write_checkpoint(tmp_path / "step-00000007", words, STATE, {})


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_flush_folders(
    tmp_path: Path, monkeypatch: Any, number: int, fails: bool
) -> None:
    fsync = os.fsync

    def refuses_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, "no folders")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    with pytest.raises(CheckpointError, match="no folders") if fails else nullcontext():
        read_checkpoint(write(tmp_path / "step-00000007"))


def test_an_error_of_the_checksum_ends_the_save(tmp_path: Path, monkeypatch: Any) -> None:
    class Broken:
        def update(self, piece: Any) -> None:
            raise MemoryError("no memory for the checksum")

    monkeypatch.setattr(format_module, "blake3", Broken)
    with pytest.raises(MemoryError, match="for the checksum"):
        write(tmp_path / "step-00000007")
    assert not any(tmp_path.iterdir())


def test_a_checksum_needs_no_thread(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        path = write(tmp_path / "step-00000007")
    assert list(read_checkpoint(path)[0]) == list(ARRAYS)


def test_others_can_read_the_shards(tmp_path) -> None:
    from safetensors.numpy import load_file

    loaded = load_file(write(tmp_path / "c") / "arrays-00001.safetensors")
    np.testing.assert_array_equal(loaded["model/kernel"], ARRAYS["model/kernel"])
    assert loaded["model/brain"].dtype == np.uint16


def test_large_state_is_cut_into_shards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(format_module, "SHARD_BYTES", 40)
    path = write(tmp_path / "c")
    assert len(list(path.glob("arrays-*.safetensors"))) > 2
    arrays, _ = read_checkpoint(path)
    assert all(arrays[k].tobytes() == np.asarray(v).tobytes() for k, v in ARRAYS.items())


def files_of(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "longer", "flip", "gone", "link", "folder"])
@pytest.mark.parametrize("name", ["arrays-00001.safetensors", "state.json", MANIFEST])
def test_damage_is_named_and_refused(tmp_path, name: str, damage: str) -> None:
    path = write(tmp_path / "c")
    file = path / name
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "longer":
        file.write_bytes(content + b" ")
    elif damage == "flip":
        at = len(content) // 2
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        file.rename(tmp_path / "elsewhere")
        if damage == "link":
            file.symlink_to(tmp_path / "elsewhere")
        elif damage == "folder":
            file.mkdir()
    if name == MANIFEST and damage == "longer":
        read_checkpoint(path)  # a trailing blank changes nothing in JSON
        return
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_checkpoint(path)


def test_every_flipped_bit_of_a_small_checkpoint_is_found(tmp_path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, {"a": np.float32([1, 2])}, {"n": 1})
    for name in files_of(path):
        content = (path / name).read_bytes()
        for at in range(0, len(content), 7):
            (path / name).write_bytes(
                content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
            )
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
        (path / name).write_bytes(content)
    assert verify(path) == []


def test_shapes_dtypes_and_formats_must_agree(tmp_path) -> None:
    path = write(tmp_path / "c")
    forge(path, lambda m: m["arrays"]["model/kernel"].update(shape=[4, 3]))
    with pytest.raises(CheckpointError, match="model/kernel has shape"):
        read_checkpoint(path)
    forge(path, lambda m: m["arrays"]["model/kernel"].update(shape=[3, 4], dtype="object"))
    with pytest.raises(CheckpointError, match="dtype 'object'"):
        read_checkpoint(path)
    forge(path, lambda m: m.update(format=99))
    with pytest.raises(CheckpointError, match="format 99"):
        read_checkpoint(path)


def test_every_mismatch_is_listed(tmp_path) -> None:
    path = write(tmp_path / "c")

    def change(manifest: dict) -> None:
        manifest["arrays"]["model/kernel"]["shape"] = [12]
        manifest["arrays"]["flags"]["dtype"] = "int8"
        manifest["arrays"]["seed"]["file"] = "arrays-00002.safetensors"
        manifest["arrays"]["more"] = manifest["arrays"]["empty"]
        manifest["arrays"]["empty"] = "nothing"
        manifest["files"]["gone.json"] = {"size": 2, "blake3": ""}
        manifest["files"]["state.json"].pop("size")

    forge(path, change)
    problems = verify(path)
    for words in (
        "model/kernel has shape [3, 4] instead of [12]",
        "flags has values of bool instead of int8",
        "seed is in 'arrays-00002.safetensors', which is not a file of this checkpoint",
        "more is not in arrays-00001.safetensors",
        "gone.json: it cannot be read",
        "state.json: the manifest does not tell its size",
    ):
        assert any(words in problem for problem in problems), (words, problems)
    with pytest.raises(CheckpointError, match="flags has values"):
        read_checkpoint(path)


def test_a_file_without_a_known_checksum_is_refused(tmp_path) -> None:
    path = write(tmp_path / "c")
    forge(path, lambda m: m["files"]["state.json"].pop("blake3"))
    with pytest.raises(CheckpointError, match="no blake3 checksum"):
        read_checkpoint(path)
    forge(path, lambda m: None, lambda text: {})
    with pytest.raises(CheckpointError, match="checksum does not match"):
        read_checkpoint(path)


def _anonymous_memory() -> int:
    """Bytes of this process that are not files: maps of files may be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def test_reading_puts_no_second_copy_into_memory(tmp_path) -> None:
    size = 96 * 2**20
    write_checkpoint(tmp_path / "c", {"a": np.ones(size // 8), "b": np.ones(3)}, {})
    before = _anonymous_memory()
    arrays, _ = read_checkpoint(tmp_path / "c")
    assert float(arrays["a"].sum()) == size // 8
    assert not arrays["a"].flags.writeable
    assert _anonymous_memory() - before < size // 4


def test_state_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(format_module.MOST_BYTES, "state.json", 1000)
    with pytest.raises(CheckpointError, match=r"state\.json would have \d+ bytes.*state_dict"):
        write_checkpoint(tmp_path / "c", {}, {"much": "x" * 1000})
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_kept(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        write_checkpoint(tmp_path / "c", {"words": np.array(["a"])}, {})
    with pytest.raises(CheckpointError, match="object"):
        write_checkpoint(tmp_path / "c", {}, {"thing": object()})
    assert list(tmp_path.iterdir()) == []
