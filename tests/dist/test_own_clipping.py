"""A `train_step` that clips gradients itself clips those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import ModelError
from tests.dist.harness import keras_state
from tests.dist.small import make_trainer
from tests.tf_distribute.running import ONE_PROCESS, make_devices

WAYS = {
    "data_parallel": ["adversarial", "examples", "half", "eager"],
    "more": ["scaled", "by_norms", "vectorized", "compiled", "eager_examples"],
    "mirrored": ["by_norms", "scaled"],
}
OUT_OF_SIGHT = "examples", "vectorized"  # of the step, which a warning says
MIRRORED = {"backend": "tf_distribute", "backend__strategy": "mirrored", "backend__devices": 2}


def changed(way: str, gradients: list[Any]) -> list[Any]:
    import tensorflow as tf

    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    if way == "by_norms":
        gradients = [tf.clip_by_norm(gradient, tf.constant(0.05)) for gradient in gradients]
        norm = tf.linalg.global_norm(gradients)
        return tf.clip_by_global_norm(gradients, tf.minimum(norm, 0.06))[0]
    if way == "scaled":
        return tf.clip_by_global_norm([0.5 * (each + 2 * each) / 3 for each in dense], 0.1)[0]
    if way == "logged":
        tf.linalg.global_norm(gradients)
        return gradients
    if way == "clip_by_value":
        return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]
    if way == "of_sigmoids":  # no gradients
        return [tf.clip_by_value(tf.sigmoid(each), 0.1, 0.9) for each in dense]
    if way == "dense_clip":
        return [gradients[0], *tf.clip_by_global_norm(gradients[1:], 0.1)[0]]
    if way == "eager_mixed":
        gradients = [dense[0], *gradients[1:]]
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def build(way: str) -> Any:
    """An embedding, whose gradients are slices, and Dense layers, normalized where `scaled`."""
    import keras
    import tensorflow as tf

    class Clips(keras.Model):
        def gradients(self, x: Any, y: Any, weights: Any = None) -> list[Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                loss = self.optimizer.scale_loss(loss)
            return tape.gradient(loss, self.trainable_variables if weights is None else weights)

        def clipped_example(self, example: Any) -> list[Any]:
            """DP-SGD."""
            x, y = example
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((self(x[None], training=True) - y) ** 2)
            found = tape.gradient(loss, self.trainable_variables)
            return [tf.clip_by_norm(tf.convert_to_tensor(g), 0.1) for g in found]

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            weights = self.trainable_variables
            if way.endswith(("examples", "vectorized")):
                mapped = tf.vectorized_map if way == "vectorized" else tf.map_fn
                kinds = {"fn_output_signature": [w.dtype for w in weights]}
                found = mapped(
                    self.clipped_example, batch, **({} if way == "vectorized" else kinds)
                )
                self.optimizer.apply([tf.reduce_mean(each, 0) for each in found], weights)
            elif way == "adversarial":
                optimizers = self.optimizer, self.second
                for optimizer, own in zip(optimizers, (weights[:1], weights[1:]), strict=True):
                    found = [tf.clip_by_norm(g, 0.1) for g in self.gradients(x, y, own)]
                    optimizer.apply(tf.clip_by_global_norm(found, 0.05)[0], own)
            elif way.startswith("compiled"):

                @tf.function(jit_compile=True)
                def gradients(x: Any, y: Any) -> Any:
                    found = [tf.convert_to_tensor(g) for g in self.gradients(x, y)]
                    return changed(way, found) if way == "compiled_clip" else found

                found = gradients(x, y)
                found = found if way == "compiled_clip" else changed(way, found)
                self.optimizer.apply(found, weights)
            elif way == "half":
                scale = self.optimizer.scale_loss(1.0)
                found = tf.clip_by_global_norm(self.gradients(x, y), 0.01 * scale)[0]
                self.optimizer.apply(found, weights)
            else:
                self.optimizer.apply(changed(way, self.gradients(x, y)), weights)
            return {}

    inputs = keras.Input((4,))
    embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 3, name="embedding")(inputs))
    if way == "scaled":  # a gradient of a normalization is one that others are computed from
        normal = keras.layers.BatchNormalization(synchronized=True)
        embedded = normal(keras.layers.Dense(3)(embedded))
    model = Clips(inputs, keras.layers.Dense(2)(embedded))
    optimizer = keras.optimizers.SGD(10.0) if way == "half" else keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", run_eagerly=way.startswith("eager"))
    if way == "adversarial":
        model.second = keras.optimizers.SGD(0.1)
        model.second.build(model.trainable_variables[1:])
    return model


def weights_after(way: str, **settings: Any) -> list[np.ndarray]:
    """The weights of an epoch; of two ranks the second has fewer rows in the last batch."""
    import keras

    keras.config.set_floatx("float32" if way == "half" else "float64")
    keras.config.set_dtype_policy("mixed_float16" if way == "half" else "float64")
    random = np.random.default_rng(0)
    x, y = random.integers(0, 7, (25, 4)), random.normal(size=(25, 2)) * np.arange(25)[:, None]
    with make_trainer(**{"data__batch_size": 16, "trainer__epochs": 1, **settings}) as trainer:
        model = build(way)
        trainer.fit(model, (x, y / 50 if way == "half" else y))
        weights = [v.numpy() for v in model.trainable_variables]
    keras_state.clear()
    return weights


def outcomes(ways: list[str], **settings: Any) -> list[list[np.ndarray]]:
    if settings["backend"] == "tf_distribute":
        make_devices()
    found = []
    for way in ways:
        with warnings.catch_warnings():
            if way not in OUT_OF_SIGHT:
                warnings.filterwarnings("error", ".*(changes gradients|one process|verify)")
            found.append(weights_after(way, **settings))
    return found


def mirrored(ways: list[str]) -> list[list[np.ndarray]]:
    return outcomes(ways, **MIRRORED)


@pytest.mark.quick("data_parallel")
@pytest.mark.parametrize("which", WAYS)
def test_norms_are_those_of_the_sum(ranks: Callable[..., Any], which: str) -> None:
    ways = WAYS[which]
    truth = outcomes(ways, backend="local")
    if which == "mirrored":
        every = ranks(1, ONE_PROCESS).run(mirrored, ways)
    else:
        every = ranks(2).run(outcomes, ways, backend="data_parallel")
    assert np.abs(truth[0][-1] - truth[1][-1]).max() > 1e-3  # or clipping would do nothing
    for rank in every:
        for way, found, expected in zip(ways, rank, truth, strict=True):
            tolerance = 0.02 if way == "half" else 1e-9
            for ours, one in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, one, tolerance, tolerance, err_msg=way)


def said(way: str, **settings: Any) -> str:
    """What is refused, or warned of, in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            weights_after(way, **settings)
        except ModelError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught if "gradients" in str(w.message))


def messages() -> list[str]:
    ways = "clip_by_value", "of_sigmoids", "compiled_clip", "examples", "eager_mixed"
    found = [said(way) for way in ways]
    found += [said(way, trainer__accumulate=2) for way in ("scaled", "logged")]
    local = {"backend__local_layers": ["embedding"], "data__batch_size": 25}
    return [*found, said("dense_clip", **local), said("scaled", **local)]


def test_what_cannot_be_told_from_a_part_is_said(ranks: Callable[..., Any]) -> None:
    for found in ranks(2).run(messages):
        by_value, of_sigmoids, compiled, examples, mixed, accumulated, logged, *local = found
        assert "clips a gradient by value" in by_value
        assert "changes gradients (Maximum, Minimum, Sigmoid)" in of_sigmoids
        assert "changes gradients (L2Loss, " in compiled
        assert "cannot be followed to tape.gradient" in examples
        assert "runs eagerly" in mixed
        assert "clips gradients" in accumulated
        assert "trainer.accumulate is above 1" in accumulated
        assert "tf.linalg.global_norm of gradients is that of a part" in logged
        assert local[0] == ""
        assert "gradients of backend.local_layers" in local[1]
