"""`ktrainer checkpoint import`: models that a file of Keras 2 does not fit, and damaged files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from ktrainer.checkpoint.tf_checkpoint.match_weights import _in_one_order
from tests.checkpoint.keras2.importing import FILES, imports, in_order

pytestmark = pytest.mark.usefixtures("double_precision")


def test_layers_of_one_shape_in_another_order_by_their_names(capsys: Any) -> None:
    """Their places in the model say one thing, their numbers another."""
    keras.utils.clear_session()
    assert imports("alike-1", "alike") == 2
    lines = capsys.readouterr().err.splitlines()
    assert in_order(["dense", "by its name in another order", "dense_1"], lines[2])
    assert "Give each its name in the file" in lines[-1]
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        (["dense_3", "dense", "dense_1"], ["dense_9", "dense_2", "dense_4"], True),
        (["dense", "dense_1"], ["dense_10", "dense_9"], False),
        (["norm", "norm_1"], ["sync_batch_normalization", "sync_batch_normalization_1"], True),
        (["left", "right"], ["dense", "dense_1"], False),  # which is left?
        (["dense", "dense_1"], ["same", "same"], False),
    ],
)
def test_the_order_that_names_say(here: list[str], there: list[str], same: bool) -> None:
    assert _in_one_order(here, there) is same


NORM = "model/layer_with_weights-1"
MISFITS: dict[str, tuple[str, str, list[list[str]]]] = {
    "another shape": ("adam-1", "wide", [
        ["right/kernel", "float64[4, 4]", "float64[4, 3]", "model/layer_with_weights-3/kernel"],
        ["right/bias", "float64[4]", "float64[3]", "model/layer_with_weights-3/bias"],
        ["float64[7, 1]", "float64[6, 1]", "model/layer_with_weights-4/kernel"],
    ]),
    "missing here": ("adam-1", "without_norm", [
        ["-", "-", "float64[3]", f"{NORM}/{name}"]
        for name in ("gamma", "beta", "moving_mean", "moving_variance")
    ]),
    "missing in the file": ("adam-1", "with_more", [
        ["model/more/kernel", "float64[6, 6]", "-", "-"],
        ["model/more/bias", "float64[6]", "-", "-"],
    ]),
    "another optimizer": ("adam-1", "sgd", [["SGD", "optimizer", "the file's is Adam"]]),
    "slots of the same names": ("adam-1", "rmsprop_like_adam", [["RMSprop", "is Adam"]]),
    "legacy, of the same names": ("legacy_adam-1", "rmsprop_like_adam", [["RMSprop", "is Adam"]]),
    "not compiled": ("adam-1", "functional", [["-", "-", "optimizer", "optimizer"]]),
    "another model": ("subclassed-1", "sgd", [["-", "float64[5, 3]", "model/embed/embeddings"]]),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_table_of_what_does_not_fit(case: str, capsys: Any) -> None:
    file, model, rows = MISFITS[case]
    assert imports(file, model) == 2
    printed = capsys.readouterr().err
    lines = printed.splitlines()
    assert "nothing was written" in lines[0]
    for words in rows:
        assert any(in_order(words, line) for line in lines), (words, printed)
    if len(rows) > 1:
        assert len(lines) == 2 + len(rows), printed
    assert not Path("out").exists()


def test_single_precision_is_not_double(capsys: Any) -> None:
    keras.config.set_dtype_policy("float32")
    assert imports("adam-1", "adam") == 2
    assert in_order(["float32[4, 3]", "float64[4, 3]"], capsys.readouterr().err)


def test_one_variable_is_not_two_weights(capsys: Any) -> None:
    tf.train.Checkpoint(model=tf.train.Checkpoint(w=tf.Variable([1.0, 2.0]))).write("w")
    keras.config.set_dtype_policy("float32")
    assert imports(Path("w").absolute(), "twice") == 2
    printed = capsys.readouterr().err
    assert in_order(["float32[2]", "shared with one above", "model/w"], printed)


def copied(name: str = "adam-1") -> Path:
    for path in FILES.glob(f"{name}.*"):
        shutil.copy(path, path.name)
    return Path(name).absolute()


def test_no_checkpoint(capsys: Any) -> None:
    Path("text.index").write_text("no table")
    Path("folder").mkdir()
    for name, told in {
        "missing": "there is no",
        "text": "cannot be read",
        "folder": "no file named checkpoint",
        "model.h5": "model.load_weights(FILE)",
    }.items():
        assert imports(Path(name).absolute(), "adam") == 2
        assert told in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "index"])
def test_damaged_data(damage: str, capsys: Any) -> None:
    prefix = copied()
    data = prefix.with_name("adam-1.data-00000-of-00001")
    index = prefix.with_name("adam-1.index")
    content = bytearray(data.read_bytes())
    if damage == "cut":
        data.write_bytes(content[: len(content) // 8])
    elif damage == "flip":
        content[50] ^= 1
        data.write_bytes(content)
    elif damage == "remove":
        data.unlink()
    else:
        index.write_bytes(index.read_bytes()[:400])
    assert imports(prefix, "fast_adam") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_file_without_objects(capsys: Any) -> None:
    """As TensorFlow 1's Saver writes it."""
    path = str(Path("names").absolute())
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=["dense/kernel"], shape_and_slices=[""], tensors=[tf.ones((2, 2))]
    )
    assert imports(path, "adam") == 2
    assert "by name only, as TensorFlow 1's Saver" in capsys.readouterr().err
