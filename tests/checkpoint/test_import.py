"""`ktrainer checkpoint import`: files that Keras 2 wrote, and what Keras 2 got from them.

The files and the numbers are those of `keras2/make_files.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from tests.checkpoint.keras2 import models
from tests.checkpoint.keras2.importing import (
    FILES,
    X,
    Y,
    imported,
    imports,
    in_order,
    restored,
    truth,
)

pytestmark = pytest.mark.usefixtures("double_precision")


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


@pytest.mark.parametrize("name", ["amsgrad", "legacy_amsgrad"])
def test_an_optimizer_that_adds_up_gradients_counts_each(name: str) -> None:
    """Four updates of Keras 2 of two gradients each are eight steps; the next ones are its own."""
    numbers = truth(f"optimizer_{name}")
    assert imports(f"optimizer_{name}-1", f"accumulated_{name}") == 0
    model = getattr(models, f"accumulated_{name}")()
    assert restored(model).step == int(model.optimizer._iterations.numpy()) == 8
    x, y = (np.repeat(a.reshape(4, 6, -1), 2, axis=0).reshape(48, -1) for a in (X, Y))
    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)  # each batch twice
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
    assert in_order(["-", "-", "float32[2]", "model/more"], capsys.readouterr().err)
