"""Checkpoints whose checksums are right, and whose JSON is not what was ever written (row 25)."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from blake3 import blake3

from ktrainer import CheckpointError, Trainer
from ktrainer.checkpoint import read_checkpoint, resume
from ktrainer.checkpoint.contents.validate_state import read_run
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST, STATE
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.cli import main
from ktrainer.distributed import SingleWorld, current_world
from tests.checkpoint.whole import write_checkpoint
from tests.faults.forging import replace
from tests.faults.test_reading import shard
from tests.small import BATCH, build, data

ALONE = SingleWorld()
SHARD = "arrays-00001.safetensors"
OTHERS: list[Any] = [
    *(None, True, -1, 2**63, 10**400, 0.5, float("inf"), float("nan"), "x", "", "16"),
    *([], [None], [-1], [[]], {}, {"a": 1}),
    *({"__array__": [300], "dtype": "uint8"}, {"__array__": [1, 2], "dtype": "int64"}),
    *({"__array__": [[1], {}], "dtype": "int8"}, {"__array__": 1, "dtype": []}),
]


def changed(value: Any) -> Iterator[Any]:
    """`value` with each part in it, and all of it, replaced by each of `OTHERS`, or left out."""
    yield from OTHERS
    if not isinstance(value, (list, dict)):
        return
    for key in range(len(value)) if isinstance(value, list) else list(value):
        for other in changed(value[key]):
            one = copy.copy(value)
            one[key] = other
            yield one
        yield (
            [*value[:key], *value[key + 1 :]]
            if isinstance(value, list)
            else {name: each for name, each in value.items() if name != key}
        )


def refuses(read: Callable[[], Any]) -> int:
    """1 if it raises the error that says so, 0 if it raises none."""
    try:
        read()
    except CheckpointError:
        return 1
    return 0


@pytest.mark.parametrize(
    "shape", [5, None, "", {}, [1] * 100], ids=["5", "null", "text", "{}", "100"]
)
def test_row_25_a_shape_that_is_none(tmp_path: Path, shape: Any) -> None:
    write_checkpoint(tmp_path / "c", {"a": np.zeros(2)}, {})
    forged = {"a": {"dtype": "F64", "shape": shape, "data_offsets": [0, 16]}}
    replace(tmp_path / "c", SHARD, shard(forged))
    with pytest.raises(CheckpointError, match="a is described wrongly"):
        read_checkpoint(tmp_path / "c")


def test_row_25_any_header(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"a": np.zeros(2)}, {})
    header = {"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}
    refused = 0
    for forged in changed(header):
        replace(tmp_path / "c", SHARD, shard(forged))
        refused += refuses(lambda: read_checkpoint(tmp_path / "c"))
    assert refused > 100


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """A checkpoint inside an epoch, with all that there may be in one."""
    folder = tmp_path_factory.mktemp("saved")
    words = {
        "run.dir": folder,
        "trainer.max_steps": 8,  # 6 are an epoch
        "trainer.epochs": 2,
        "checkpoint.every": "8ba",
        "checkpoint.best": "val_loss",
        "trainer.validate_every": "2ba",
        "logging.progress": "none",
    }
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    stops = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    overrides = [f"{key}={value}" for key, value in words.items()]
    with Trainer(overrides=overrides, callbacks=[stops]) as trainer:
        trainer.fit(build, batches, validation_data=batches)
    keras.utils.clear_session()
    _, state = read_run(folder / "checkpoints" / "step-00000008")
    assert state["progress"]["batch"] == 2
    assert state["data_replicas"] == [0]
    assert any(each["weights"] for each in state["callbacks"])
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to be forged, alone in a run's folder."""
    shutil.copytree(saved / "checkpoints" / "step-00000008", tmp_path / "checkpoints" / "step-8")
    return (tmp_path / "checkpoints" / "step-8").rename(tmp_path / "checkpoints" / "step-00000008")


@pytest.mark.exhaustive
def test_row_25_any_manifest(copied: Path, capsys: Any) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    some = list(manifest["arrays"])[:2]
    manifest["arrays"] = {name: manifest["arrays"][name] for name in some}
    del manifest["checksum"]
    lists = ["list", str(copied.parent)], ["show", str(copied)], ["show", "--best", "."]
    refused = 0
    for number, forged in enumerate(changed(manifest)):
        if isinstance(forged, dict):  # else it has no checksum that could be right
            digits = {"blake3": blake3(json.dumps(forged).encode()).hexdigest()}
            (copied / MANIFEST).write_text(json.dumps({**forged, "checksum": digits}))
        refused += refuses(lambda: read_run(copied))
        store = Store(copied.parent)
        (entry,) = store.entries()
        store.best("val_loss", "min")
        assert main.main(["checkpoint", *lists[number % 3]]) in (0, 2)
        capsys.readouterr()
        assert entry.step == 8
    assert refused > 300


@pytest.mark.filterwarnings("ignore:the checkpoint has other metrics")
@pytest.mark.filterwarnings("ignore:metrics whose states do not add up")
def test_row_25_any_state(copied: Path) -> None:
    """Refused, or good enough to resume from."""
    state = json.loads((copied / STATE).read_text())
    state["callbacks"] = [each for each in state["callbacks"] if each["weights"]]
    model, stops = build(), keras.callbacks.EarlyStopping("val_loss")
    refused = 0
    for forged in changed(state):
        replace(copied, STATE, json.dumps(forged).encode())
        refused += refuses(
            lambda: resume(str(copied), copied.parent, model=model, world=ALONE, callbacks=[stops])
        )
    assert refused > 300
    replace(copied, STATE, b"null")  # never a fresh start that was not asked for
    with pytest.raises(CheckpointError, match="not the state of a run: it is no table"):
        resume("auto", copied.parent, model=model, world=ALONE)


def ends_together(folder: str) -> list[str]:
    """What each rank says of a checkpoint that cannot be read, for an unforeseen reason."""
    said = []
    for mode in ("auto", folder):
        with mock.patch("ktrainer.checkpoint.restore_run.read_run", side_effect=KeyError("what")):
            try:
                resume(mode, folder, model=build(), world=current_world())
            except CheckpointError as error:
                said += [type(error.__cause__).__name__, str(error)]
    return said


@pytest.mark.exhaustive
def test_row_25_all_ranks_end_together(ranks: Callable[..., Any], copied: Path) -> None:
    folder = str(copied.parent)
    first, second = ranks(2).run(ends_together, folder, deadline=60)
    told = f"no checkpoint can be read in {folder}: KeyError: 'what'"
    assert first == ["KeyError", told] * 2
    assert second == ["NoneType", told] * 2
