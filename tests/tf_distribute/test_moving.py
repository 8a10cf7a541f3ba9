"""Models that move: whatever was compiled before sees the new variables."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from tests.dist.small import small_model
from tests.tf_distribute.running import close, make_devices, under
from tests.tf_distribute.test_features import trainer, vectors, weights_of


def kerass_own_predict() -> Any:
    """`Model.predict` before, in and after the strategy."""
    import keras

    make_devices()
    keras.utils.set_random_seed(0)
    x, y = vectors(32)
    model = small_model()
    found = [model.predict(x, verbose=0)]
    with trainer("mirrored", 2, trainer__epochs=20) as it:
        it.fit(model, (x, y))
        ours = it.predict(model, x)
        found.append(model.predict(x, verbose=0))
    return [*found, model.predict(x, verbose=0)], ours


@pytest.mark.exhaustive
def test_keras_own_predict_is_compiled_again(ranks: Callable[..., Any]) -> None:
    ((found, ours),) = under(ranks, "mirrored", kerass_own_predict)
    before, inside, after = found
    assert np.abs(before - ours).max() > 0.1
    np.testing.assert_allclose(inside, ours, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, ours, rtol=1e-5, atol=1e-6)


def evaluated_by_another(strategy: str, other: str, steps: int) -> Any:
    """A callback that evaluates with a Trainer of its own, which moves the model and closes."""
    import keras

    x, y = vectors(48)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if other:
                with trainer(other, 2) as its_own:
                    its_own.evaluate(self.model, (x, y))

    make_devices()
    keras.utils.set_random_seed(0)
    model = small_model()
    model.compile(keras.optimizers.Adam(0.01), model.loss)  # with slots, which move too
    words = {"data__batch_size": 16, "trainer__epochs": 3, "trainer__steps_per_call": steps}
    with trainer(strategy, 2, (Evaluate(),), **words) as it:
        it.fit(model, (x, y))
        made = int(it.model.optimizer.iterations.numpy())
        return made, weights_of(it.model), it.predict(it.model, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("other", "steps"), [("mirrored", 1), ("central_storage", 3)])
def test_another_trainer_may_take_the_model_in_between(
    ranks: Callable[..., Any], other: str, steps: int
) -> None:
    ((made, weights, outputs),) = under(ranks, "", evaluated_by_another, "mirrored", other, steps)
    ((_, undisturbed, expected),) = under(ranks, "", evaluated_by_another, "mirrored", "", steps)
    assert made == 9
    close(weights, undisturbed, 0, 0)
    np.testing.assert_array_equal(outputs, expected)


def taken_by_another(strategy: str, other: str) -> Any:
    """Trained, then used by another Trainer, then trained and used again, both Trainers open."""
    import keras

    x, y = vectors(32)
    make_devices()
    keras.utils.set_random_seed(0)
    model = small_model()
    with trainer(strategy, 2, data__batch_size=16) as first, trainer(other, 2) as second:
        found = []
        for _ in range(2):
            first.fit(model, (x, y))
            found.append(first.predict(model, x))
            second.evaluate(model, (x, y))
        return found


@pytest.mark.exhaustive
def test_a_trainer_predicts_after_another_had_the_model(ranks: Callable[..., Any]) -> None:
    (ours,) = under(ranks, "", taken_by_another, "mirrored", "central_storage")
    (expected,) = under(ranks, "", taken_by_another, "local", "local")
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def validated_after_an_epoch(strategy: str) -> Any:
    """A `train_step` of its own, which does not make what evaluation needs, and accumulation."""
    import keras
    import tensorflow as tf

    class Own(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = keras.losses.mean_squared_error(y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"norm": tf.reduce_sum(tf.square(weights[0]))}

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    model = Own(inputs, keras.layers.Dense(8)(inputs))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, _ = vectors(32)
    words = {"data__batch_size": 8, "trainer__accumulate": 2, "trainer__epochs": 3}
    with trainer(strategy, 2, **words) as it:
        losses = it.fit(model, (x, x), validation_data=(x, x)).history["val_loss"]
        return losses, weights_of(model)


def test_accumulation_continues_after_the_first_validation(ranks: Callable[..., Any]) -> None:
    ((losses, ours),) = under(ranks, "mirrored", validated_after_an_epoch, "mirrored")
    ((expected, reference),) = under(ranks, "local", validated_after_an_epoch, "local")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(ours, reference)


def normalised_weights(strategy: str, **more: Any) -> Any:
    """Layers that assign their weights in every call, once."""
    import keras

    class Shrinking(keras.layers.Dense):
        def call(self, x: Any) -> Any:
            self.kernel.assign(0.9 * self.kernel)
            return super().call(x)

    keras.utils.set_random_seed(0)
    x, y = vectors(64)
    with trainer(strategy, 2, data__batch_size=16, **more) as it:
        inputs = keras.Input((8,))
        hidden = keras.layers.SpectralNormalization(keras.layers.Dense(8))(inputs)
        model = keras.Model(inputs, Shrinking(3)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        it.fit(model, (x, y))
        return weights_of(model)


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "accumulate"), [("central_storage", 1), ("mirrored", 2)])
def test_layers_that_assign_their_weights(
    ranks: Callable[..., Any], strategy: str, accumulate: int
) -> None:
    words = {"trainer__accumulate": accumulate}
    (ours,) = under(ranks, strategy, normalised_weights, strategy, **words)
    (reference,) = under(ranks, "local", normalised_weights, "local", **words)
    close(ours, reference)


def refused_with_xla() -> str:
    from ktrainer.errors import ModelError

    with pytest.raises(ModelError) as caught:
        normalised_weights("mirrored", trainer__xla="true")
    return str(caught.value)


def test_xla_and_layers_that_assign_their_weights(ranks: Callable[..., Any]) -> None:
    (text,) = under(ranks, "mirrored", refused_with_xla)
    assert "Set trainer.xla=false" in text


def moved_with_slots(strategy: str) -> Any:
    """Trained in one process, under a strategy, and in one process again, by optimizers that know
    their variables: whose slots are whose, and which weights decay."""
    import keras

    make_devices()
    keras.utils.set_random_seed(0)
    x, y = vectors(32)
    model = small_model()
    decaying, others = keras.optimizers.AdamW(0.01, weight_decay=0.9), keras.optimizers.Adam()
    decaying.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    which = keras.optimizers.OptimizerMap(decaying, {".*/bias": others})
    model.compile(keras.optimizers.MultiOptimizer(which), model.loss)
    for name in ("local", strategy, "local"):
        with trainer(name, 2, data__batch_size=16) as it:
            it.fit(model, (x, y))
    return weights_of(model)


@pytest.mark.skipif(version("keras").startswith("3.14."), reason="Keras 3.14 has no MultiOptimizer")
def test_optimizers_find_their_variables_again(ranks: Callable[..., Any]) -> None:
    (ours,) = under(ranks, "mirrored", moved_with_slots, "mirrored")
    (reference,) = under(ranks, "local", moved_with_slots, "local")
    close(ours, reference, atol=1e-6)


def random_outputs(strategy: str) -> Any:
    """Noise also in predictions."""
    import keras

    class Noise(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: Any) -> Any:
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Noise()(inputs))
    x = np.zeros((8, 4), "float32")
    with trainer(strategy, 2, data__batch_size=8) as it:
        return [it.predict(model, x) for _ in range(2)]


def test_random_states_continue_from_prediction_to_prediction(ranks: Callable[..., Any]) -> None:
    ((first, second),) = under(ranks, "mirrored", random_outputs, "mirrored")
    ((reference, again),) = under(ranks, "local", random_outputs, "local")
    assert np.abs(first - second).min() > 0
    assert np.abs(reference - again).min() > 0
