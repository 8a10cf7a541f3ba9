"""`ktrainer checkpoint import`: files that Keras 2 wrote, and what Keras 2 got from them.

The files and the numbers are those of `keras2/make_files.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.checkpoint import resume
from ktrainer.checkpoint.tf_checkpoint.match_weights import _in_one_order
from ktrainer.cli import main
from ktrainer.distributed import SingleWorld
from tests.checkpoint.keras2 import models

FILES = Path(__file__).parent / "keras2"
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(24, 4)), RANDOM.normal(size=(24, 1))


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


def truth(name: str) -> dict[str, np.ndarray]:
    with np.load(FILES / f"{name}.npz") as file:
        return dict(file)


def imports(file: str | Path, model: str, *words: str) -> int:
    function = f"tests.checkpoint.keras2.models:{model}"
    command = ["checkpoint", "import", str(FILES / file), "--model", function, "--out", "out"]
    return main.main([*command, *words])


def imported() -> Path:
    (path,) = Path("out").glob("step-*")
    return path


def restored(model: Any) -> Any:
    progress = resume(str(imported()), "out", model=model, world=SingleWorld())
    assert progress is not None
    assert progress.epoch == progress.batch == 0
    return progress


@pytest.mark.parametrize(
    ("file", "model", "name"),
    [
        ("adam-1", "fast_adam", "adam"),
        ("legacy_subclassed-1", "subclassed_adam", "legacy_subclassed"),
        ("subclassed-1", "subclassed_sgd", "subclassed"),
        ("legacy_adam-1", "other_betas", "legacy_adam"),
        ("legacy_sgd-1", "sgd", "legacy_sgd"),
        ("rmsprop-1", "rmsprop", "rmsprop"),
        ("towers-1", "towers", "towers"),
        ("recurrent-1", "recurrent", "recurrent"),
        ("alike-1", "alike_named", "alike"),
        ("managed/ckpt-1.index", "fast_adam", "of_fit"),
        ("save_weights", "fast_adam", "of_fit"),
    ],
)
@pytest.mark.quick("adam-1-fast_adam-adam", "towers-1-towers-towers")
def test_training_continues_as_in_keras_2(file: str, model: str, name: str, capsys: Any) -> None:
    numbers = truth(name)
    assert imports(file, model) == 0
    path, make = imported(), getattr(models, model)
    assert path.name == "step-00000004"
    assert f"checkpoint.resume={path}" in capsys.readouterr().out
    again = make()
    assert restored(again).step == 4
    np.testing.assert_allclose(again(X), numbers["saved"], rtol=0, atol=1e-10)

    words = ["trainer.epochs=1", "data.batch_size=6", "data.shuffle=false", "logging.progress=none"]
    with Trainer(overrides=[*words, f"checkpoint.resume={path}"]) as trainer:
        trainer.fit(make(), (X, Y))
        np.testing.assert_allclose(trainer.model(X), numbers["continued"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", models.OTHERS)
@pytest.mark.quick("lion", "legacy_ftrl", "exponential")
def test_other_optimizers_continue_as_in_keras_2(name: str) -> None:
    numbers = truth(f"optimizer_{name}")
    assert imports(f"optimizer_{name}-1", name) == 0
    model = getattr(models, name)()
    restored(model)
    np.testing.assert_allclose(model(X), numbers["saved"], rtol=0, atol=1e-10)
    for k in range(0, 24, 6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X[k : k + 6]) - Y[k : k + 6]) ** 2)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
    np.testing.assert_allclose(model(X), numbers["continued"], rtol=0, atol=1e-10)


def test_the_newest_of_a_folder(capsys: Any) -> None:
    assert imports("managed", "fast_adam") == 0
    model = models.fast_adam()
    assert restored(model).step == 8
    np.testing.assert_allclose(model(X), truth("of_fit")["continued"], rtol=0, atol=1e-10)
    assert imports("managed", "fast_adam") == 2
    assert "exists already" in capsys.readouterr().err


def test_a_loop_of_ones_own_continues(tmp_path: Path) -> None:
    assert imports("adam-1", "fast_adam") == 0
    model = models.fast_adam()
    words = ["trainer.epochs=1", "data.batch_size=6", "data.shuffle=false", "logging.progress=none"]
    with Trainer(overrides=[*words, f"checkpoint.resume={imported()}"]) as trainer:
        for x, y in trainer.steps((X, Y), model=model, optimizer=model.optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
    np.testing.assert_allclose(model(X), truth("adam")["continued"], rtol=0, atol=1e-10)


def test_a_gan_with_two_optimizers() -> None:
    assert imports("gan-1", "gan") == 0
    model = models.gan()
    restored(model)
    np.testing.assert_allclose(model(X), truth("gan")["saved"], rtol=0, atol=1e-10)
    reader = tf.train.load_checkpoint(str(FILES / "gan-1"))
    kernel = "generator/layer_with_weights-0/kernel"
    slot = f"{kernel}/.OPTIMIZER_SLOT/generator_optimizer/m/.ATTRIBUTES/VARIABLE_VALUE"
    slots = {v.name: v.numpy() for v in model.generator_optimizer.variables}
    (momentum,) = [v for n, v in slots.items() if n.endswith("kernel_momentum")]
    np.testing.assert_array_equal(momentum, reader.get_tensor(slot))
    for optimizer in (model.generator_optimizer, model.discriminator_optimizer):
        assert int(optimizer.iterations.numpy()) == 4
        assert len(optimizer.variables) == 6  # slots of its own model alone


def test_named_layers_are_found_in_another_order() -> None:
    assert [layer.name for layer in models.adam().layers if layer.weights][-2] == "right"
    assert next(layer.name for layer in models.other_order().layers if layer.weights) == "right"
    assert imports("adam-1", "other_order") == 0
    model = models.other_order()
    restored(model)
    np.testing.assert_allclose(model(X), truth("adam")["saved"], rtol=0, atol=1e-10)


def test_layers_without_names_are_found_in_order(capsys: Any) -> None:
    assert imports("branches-1", "branches") == 0
    assert "no optimizer in the file" in capsys.readouterr().err
    model = models.branches()
    assert restored(model).step == 0
    np.testing.assert_allclose(model([X, X + 1]), truth("branches")["saved"], rtol=0, atol=1e-10)


def test_layers_of_one_shape_in_another_order_by_their_names(capsys: Any) -> None:
    """Their places in the model say one thing, their numbers another."""
    keras.utils.clear_session()
    assert imports("alike-1", "alike") == 2
    lines = capsys.readouterr().err.splitlines()
    assert _in_order(["dense", "by its name in another order", "dense_1"], lines[2])
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


def test_momentums_of_sgd_without_momentum(capsys: Any) -> None:
    assert imports("alike-1", "alike_named") == 0
    assert "has no momentum: those in the file are left out" in capsys.readouterr().err


def test_nadam(capsys: Any) -> None:
    """Keras 2 updates it otherwise in compiled functions, so only its state is compared."""
    assert imports("optimizer_nadam-1", "nadam") == 0
    assert "the next updates differ a little" in capsys.readouterr().err
    model = models.nadam()
    restored(model)
    np.testing.assert_allclose(model(X), truth("optimizer_nadam")["saved"], rtol=0, atol=1e-10)
    reader = tf.train.load_checkpoint(str(FILES / "optimizer_nadam-1"))
    product = reader.get_tensor("optimizer/_u_product/.ATTRIBUTES/VARIABLE_VALUE")
    assert model.optimizer._u_product.numpy() == product
    # _variables: the iterations, then m and v of each weight.
    slots = [f"optimizer/_variables/{1 + 2 * k}/.ATTRIBUTES/VARIABLE_VALUE" for k in range(4)]
    for momentum, slot in zip(model.optimizer._momentums, slots, strict=True):
        np.testing.assert_array_equal(momentum, reader.get_tensor(slot))


def test_slots_of_weights_that_share_a_name(capsys: Any) -> None:
    assert imports("towers-1", "towers") == 0
    assert "several weights are named hidden/bias, hidden/kernel" in capsys.readouterr().err


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
        assert any(_in_order(words, line) for line in lines), (words, printed)
    if len(rows) > 1:
        assert len(lines) == 2 + len(rows), printed
    assert not Path("out").exists()


def _in_order(words: list[str], line: str) -> bool:
    for word in words:
        _, found, line = line.partition(word)
        if not found:
            return False
    return True


def test_weights_only(capsys: Any) -> None:
    assert imports("adam-1", "sgd", "--weights-only") == 0
    assert "the optimizer starts new" in capsys.readouterr().err
    model = models.sgd()
    assert restored(model).step == 0
    np.testing.assert_allclose(model(X), truth("adam")["saved"], rtol=0, atol=1e-10)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_notes(capsys: Any) -> None:
    """What the model decides, or the file has beside the model."""
    assert imports("adam-1", "scheduled") == 0
    told = capsys.readouterr().err
    assert "epoch = 7 is left out" in told
    assert "learning rate 0.05 in the file; the model's schedule is used" in told
    shutil.rmtree("out")
    assert imports("legacy_adam-1", "fast_adam") == 0
    assert "beta_1 is 0.75 in the file; the model's is used: 0.9" in capsys.readouterr().err


def test_single_precision_is_not_double(capsys: Any) -> None:
    keras.config.set_dtype_policy("float32")
    assert imports("adam-1", "adam") == 2
    assert _in_order(["float32[4, 3]", "float64[4, 3]"], capsys.readouterr().err)


# Files that are no checkpoints, or damaged


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


def test_modules_and_one_more_variable(capsys: Any) -> None:
    """Any objects with these names will do: a file of plain modules, of a Horovod script."""
    layers = []
    for shape in ((4, 3), (3, 1)):
        kernel, bias = tf.Variable(tf.ones(shape)), tf.Variable(tf.ones(shape[-1:]))
        layers.append(tf.train.Checkpoint(kernel=kernel, bias=bias))
    net = tf.train.Checkpoint(**{f"layer_with_weights-{k}": x for k, x in enumerate(layers)})
    keras.config.set_dtype_policy("float32")
    tf.train.Checkpoint(model=net).write("plain")
    assert imports(Path("plain").absolute(), "two_layers") == 0
    model = models.two_layers()
    restored(model)
    assert all(np.all(weight == 1) for weight in model.get_weights())
    net.more = tf.Variable([1.0, 2.0])
    tf.train.Checkpoint(model=net).write("plain")
    assert imports(Path("plain").absolute(), "two_layers") == 2
    assert _in_order(["-", "-", "float32[2]", "model/more"], capsys.readouterr().err)


def test_one_variable_is_not_two_weights(capsys: Any) -> None:
    tf.train.Checkpoint(model=tf.train.Checkpoint(w=tf.Variable([1.0, 2.0]))).write("w")
    keras.config.set_dtype_policy("float32")
    assert imports(Path("w").absolute(), "twice") == 2
    printed = capsys.readouterr().err
    assert _in_order(["float32[2]", "shared with one above", "model/w"], printed)
