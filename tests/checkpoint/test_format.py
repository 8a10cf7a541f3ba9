"""A checkpoint on disk is there whole, or not at all, and is checked before it is believed."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ktrainer.checkpoint.format as format_module
from ktrainer.checkpoint import read_checkpoint, verify, write_checkpoint
from ktrainer.checkpoint.encoding import decode_json, encode_json
from ktrainer.checkpoint.format import MANIFEST
from ktrainer.checkpoint.store import Store
from ktrainer.errors import CheckpointError

ARRAYS = {
    "model/kernel": np.arange(12, dtype="float32").reshape(3, 4) / 7,
    "model/half": np.float16([1.5, -2]),
    "model/brain": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "model/eight": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "optimizer/0/0:iteration": np.int64(7),
    "model/scalar": np.array(2.5, ml_dtypes.bfloat16),
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


def test_private_even_without_a_umask(tmp_path) -> None:
    before = os.umask(0)
    try:
        path = write(tmp_path / "checkpoints" / "c")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in path.iterdir()} == {0o600}


def test_order_of_flushing(tmp_path, monkeypatch) -> None:
    """Files, manifest, folder, rename, parent: then a crash loses nothing that was announced."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (
            events.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name),
            fsync(fd),
        ),
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write(tmp_path / "c")
    assert events == [
        "fsync arrays-00001.safetensors",
        "fsync state.json",
        "fsync manifest.json",
        f"fsync .c.tmp-{os.getpid()}",
        "rename",
        f"fsync {tmp_path.name}",
    ]


POINTS = ("before file", "after file", "before rename", "after rename", "flushed folder")


class Killed(BaseException):
    """Not an Exception: no clean-up of ours may run, as after SIGKILL."""


@pytest.mark.parametrize("replace", [False, True])
def test_killed_at_every_point(tmp_path, monkeypatch, replace: bool) -> None:
    """The latest checkpoint is the one before or the new one, and complete."""
    store = Store(tmp_path)
    store.save({"a": np.zeros(3)}, {"n": 0}, step=2 if replace else 1)
    reached = []
    for point in POINTS:
        for nth in range(5):
            count = iter(range(100))

            def die(at: str, path: Path, point=point, nth=nth, count=count) -> None:
                if at == point and next(count) == nth:
                    reached.append((point, nth))
                    raise Killed

            monkeypatch.setattr(format_module, "probe", die)
            with contextlib.suppress(Killed):
                store.save({"a": np.ones(3)}, {"n": 1}, step=2)
            monkeypatch.setattr(format_module, "probe", lambda at, path: None)
            store.sweep()
            assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
            latest = store.latest()
            assert latest is not None
            arrays, state = read_checkpoint(latest.path)
            assert (state["n"], arrays["a"].tolist()) in [(0, [0] * 3), (1, [1] * 3)]
    assert {point for point, _ in reached} == set(POINTS)


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


def forge(path: Path, change: Any) -> None:
    """Change the manifest and make its checksum right again, as an attacker would."""
    manifest = decode_json((path / MANIFEST).read_bytes())
    manifest.pop("checksum")
    change(manifest)
    manifest["checksum"] = format_module._checksum(encode_json(manifest))
    (path / MANIFEST).write_bytes(encode_json(manifest))


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname", "a/b.json", "x.pkl", ".json"])
def test_file_names_stay_inside(tmp_path, name: str) -> None:
    path = write(tmp_path / "c")
    (tmp_path / "secret.json").write_text("{}")
    forge(path, lambda m: m["files"].update({name: {"size": 2, "blake2b": "0"}}))
    with pytest.raises(CheckpointError, match="not a file name"):
        read_checkpoint(path)

    def elsewhere(manifest: dict) -> None:
        manifest["files"].pop(name)
        manifest["arrays"]["flags"]["file"] = name

    forge(path, elsewhere)
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        read_checkpoint(path)


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


def test_a_header_that_lies_about_sizes(tmp_path) -> None:
    path = write(tmp_path / "c")
    shard = path / "arrays-00001.safetensors"
    header = json.dumps({"a": {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(16)
    shard.write_bytes(data)

    def lie(manifest: dict) -> None:
        manifest["files"][shard.name] = {
            "size": len(data),
            "blake2b": format_module._checksum(data),
        }

    forge(path, lie)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(path)


def test_no_space_leaves_the_old_one(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "step-00000001", mark="old")

    def full(at: str, file: Path) -> None:
        if at == "after file" and file.name == "state.json":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(format_module, "probe", full)
    for name in ("step-00000001", "step-00000002"):
        with pytest.raises(CheckpointError, match="No space left"):
            write(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert verify(path) == []


def test_values_that_cannot_be_kept(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        write_checkpoint(tmp_path / "c", {"words": np.array(["a"])}, {})
    with pytest.raises(CheckpointError, match="object"):
        write_checkpoint(tmp_path / "c", {}, {"thing": object()})
    assert list(tmp_path.iterdir()) == []
