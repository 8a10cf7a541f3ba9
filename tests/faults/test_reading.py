"""Rows 3, 4, 17, 23, 24 and 25: checkpoints that are damaged, hostile, or of another model."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer.checkpoint import read_checkpoint, resume
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST, MODEL
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.cli import main
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from tests.callbacks.helpers import fit
from tests.checkpoint.whole import write_checkpoint
from tests.dist.harness.group import ROOT
from tests.faults.forging import cut, flip, forge, replace

ALONE = SingleWorld()
RAN = Path("ran")  # what hostile code would leave in the folder of the test


def named_model(units: int = 3, name: str = "first", optimizer: str = "sgd") -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, name=name), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """Checkpoints of epochs 1 to 3."""
    from ktrainer.callbacks import Checkpoint

    directory = tmp_path_factory.mktemp("saved")
    fit(named_model(), [Checkpoint(directory, every="1ep", keep=3)], epochs=3)
    return directory


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


FILES = ["arrays-00001.safetensors", "state.json", MODEL, MANIFEST]


# Rows 3 and 4


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("name", FILES)
def test_row_03_flipped_byte(folder: Path, name: str, damage: Any) -> None:
    newest = folder / "step-00000015"
    damage(newest / name)
    with pytest.warns(UserWarning, match=rf"{name}.*trying the one before"):
        progress = resume("auto", folder, model=named_model(), world=ALONE)
    assert progress is not None
    assert progress.step == 10
    with pytest.raises(CheckpointError, match=name):
        resume(str(newest), folder, model=named_model(), world=ALONE)


def test_row_04_every_checkpoint_is_bad(folder: Path) -> None:
    for k, entry in enumerate(Store(folder).entries()):
        [cut, flip][k % 2](entry.path / FILES[k])
    model = named_model()
    before = model.get_weights()
    with (
        pytest.warns(UserWarning, match="the one before"),
        pytest.raises(CheckpointError, match=r"(?s)all 3 checkpoints .*resume=never") as raised,
    ):
        resume("auto", folder, model=model, world=ALONE)
    for name in FILES[:3]:
        assert name in str(raised.value)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# Row 17


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"units": 5},
            ["net/first/kernel has shape [4, 5], but [4, 3]", "net/last/kernel", "bias"],
        ),
        (
            {"name": "renamed"},
            ["net/renamed/kernel is not in the checkpoint", "net/first/bias is in the checkpoint"],
        ),
        ({"optimizer": "adam"}, ["optimizers ['Adam'], the checkpoint ['SGD']"]),
        (
            {"units": 5, "name": "renamed", "optimizer": "adam"},
            ["['Adam']", "renamed/kernel is not in", "net/last/kernel has shape [5, 1]"],
        ),
        ({"policy": "float64"}, ["net/first/kernel has dtype float64, but float32", "last/bias"]),
    ],
    ids=["shape", "name", "optimizer", "all", "dtype"],
)
def test_row_17_a_mismatch_lists_all(saved: Path, changed: dict[str, Any], told: list[str]) -> None:
    changed = dict(changed)
    keras.config.set_dtype_policy(changed.pop("policy", "float32"))
    model = named_model(**changed)
    before = [np.array(v.numpy()) for v in [*model.weights, *model.optimizer.variables]]
    with pytest.raises(CheckpointError) as raised:
        resume("auto", saved, model=model, world=ALONE)
    for words in told:
        assert words in str(raised.value)
    after = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    for a, b in zip(before, after, strict=False):  # Adam's slots were made meanwhile
        np.testing.assert_array_equal(a, b)


# Row 23


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(RAN),)


def test_row_23_a_pickle(folder: Path, capsys: Any) -> None:
    path = folder / "step-00000015"
    hostile = pickle.dumps(Hostile())
    for name in FILES[:3]:
        kept = (path / name).read_bytes()
        replace(path, name, hostile)
        if name == MODEL:  # a resume does not look into it
            words = ["checkpoint", "export", str(path), "m.keras"]
            assert main.main(words) == 2
            assert "cannot be read" in capsys.readouterr().err
        else:
            with pytest.raises(CheckpointError, match=name):
                resume(str(path), folder, model=named_model(), world=ALONE)
        replace(path, name, kept)
    (path / "more.pkl").write_bytes(hostile)
    forge(path, lambda m: m["files"].update({"more.pkl": {"size": len(hostile), "blake3": ""}}))
    with pytest.raises(CheckpointError, match=r"'more\.pkl' is not a file name"):
        resume(str(path), folder, model=named_model(), world=ALONE)
    assert not RAN.exists()


def test_row_23_nothing_here_loads_a_keras_file() -> None:
    """Nor weights, nor, of a checkpoint, a pickle: Keras files are written for others to read."""
    for path in sorted((ROOT / "ktrainer").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        names |= {n.id for n in nodes if isinstance(n, ast.Name)}
        wrong = {"load_model", "load_weights"}
        wrong |= {"pickle"} if "checkpoint" in path.parts else set()
        assert not names & wrong, path


def lambda_layer() -> dict[str, Any]:
    """A Lambda layer that makes a folder when it is called, as Keras writes it."""
    code = "lambda x: __import__('os').mkdir('ran') or x"
    return keras.saving.serialize_keras_object(keras.layers.Lambda(eval(code)))


FOREIGN = {
    "lambda": lambda_layer,
    "class": lambda: {"class_name": "Popen", "module": "subprocess", "config": {"args": ["true"]},
                      "registered_name": "Popen"},
    "module": lambda: {"class_name": "Any", "module": "hostile", "config": {},
                       "registered_name": "Any"},
    "function": lambda: {"class_name": "function", "module": "os", "config": "mkdir",
                         "registered_name": "mkdir"},
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_row_23_a_lambda_or_a_foreign_class(
    folder: Path, kind: str, capsys: Any, monkeypatch: Any
) -> None:
    Path("hostile.py").write_text("import os\nos.mkdir('ran')\nclass Any: pass\n")
    monkeypatch.syspath_prepend(".")
    path = folder / "step-00000015"
    config = json.loads((path / MODEL).read_text())
    config["config"]["layers"].insert(1, FOREIGN[kind]())
    replace(path, MODEL, json.dumps(config).encode())
    assert main.main(["checkpoint", "export", str(path), "m.keras"]) == 2
    assert "not all Keras' own" in capsys.readouterr().err
    # Where the model is the script's, what the file says of one is not looked at.
    assert resume(str(path), folder, model=named_model(), world=ALONE) is not None
    assert not RAN.exists()
    assert not Path("m.keras").exists()
    assert "hostile" not in sys.modules


# Row 24


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname", "a/b.json", "x.pkl", ".json"])
def test_row_24_file_names_stay_inside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, {"flags": np.array([True, False])}, {})
    (tmp_path / "secret.json").write_text("{}")
    forge(path, lambda m: m["files"].update({name: {"size": 2, "blake3": "0"}}))
    with pytest.raises(CheckpointError, match="not a file name"):
        read_checkpoint(path)

    def is_remote(manifest: dict) -> None:
        manifest["files"].pop(name)
        manifest["arrays"]["flags"]["file"] = name

    forge(path, is_remote)
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        read_checkpoint(path)
    assert (tmp_path / "secret.json").read_text() == "{}"


@pytest.mark.parametrize("name", FILES)
def test_row_24_links(folder: Path, tmp_path: Path, name: str) -> None:
    file = folder / "step-00000015" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name}: it is not a plain file"):
        read_checkpoint(file.parent)
    (folder / "step-00000099").symlink_to(folder / "step-00000010")
    store = Store(folder)
    assert sorted(entry.step for entry in store.entries()) == [5, 10, 15]
    store.prune(1)  # does not follow links
    assert (tmp_path / "elsewhere").exists()
    assert (folder / "step-00000099").is_symlink()


# Row 25


READS = """
import resource, sys
from pathlib import Path
from ktrainer.checkpoint.format.checkpoint_reader import read_checkpoint
from ktrainer.errors import CheckpointError
import blake3, ml_dtypes, numpy
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = used + 1024 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name in sys.argv[1:]:
    try:
        read_checkpoint(Path(name))
    except CheckpointError as error:
        print(name, "refused:", str(error)[:200])
    else:
        sys.exit(f"{name} was read")
"""


def shard(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    """A safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def described(shape: list[Any], end: Any, dtype: str = "F64") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


SHARDS = {
    "more than the file": shard(described([10**12], 8 * 10**12)),
    "another size than the shape": shard(described([10**12], 16)),
    "nothing, of a huge shape": shard(described([0, 10**18, 10**18], 0)),
    "numbers beyond all bounds": shard(described([10**400], 16)),
    "negative": shard(described([-2, -1], 16)),
    "no number": shard(described(["2"], 16)),
    "an unknown dtype": shard(described([2], 16, "PICKLE")),
    "the longest header": shard(b"{}", length=2**64 - 1),
    "a header beyond the file": shard(b"{}", length=10**9),
    "a deep header": shard(b"[" * 10**6),
    "a header of another kind": shard([1, 2]),
    "no header": b"abc",
    "nothing": b"",
}


def test_row_25_sizes_that_lie_and_bombs(tmp_path: Path) -> None:
    names = []
    for name, content in SHARDS.items():
        write_checkpoint(tmp_path / name, {"a": np.zeros(2)}, {})
        replace(tmp_path / name, "arrays-00001.safetensors", content)
        names.append(name)
    for file, bomb in {
        MANIFEST: b"[" * 10**7,
        "state.json": b"[" * 10**7,
        "large/state.json": b"[" + b"[]," * (25 * 2**20) + b"0]",
    }.items():
        path = tmp_path / f"bomb {len(names)}"
        write_checkpoint(path, {"a": np.zeros(2)}, {})
        if file == MANIFEST:
            (path / MANIFEST).write_bytes(bomb)
        else:
            replace(path, "state.json", bomb)
        names.append(path.name)
    done = subprocess.run(
        [sys.executable, "-c", READS, *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused:") == len(names)
