"""Models that move: whatever was compiled before sees the new variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dist.small import small_model
from tests.tf_distribute.running import ONE_PROCESS, make_devices
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


def test_keras_own_predict_is_compiled_anew(ranks: Callable[..., Any]) -> None:
    ((found, ours),) = ranks(1, ONE_PROCESS).run(kerass_own_predict)
    before, inside, after = found
    assert np.abs(before - ours).max() > 0.1
    np.testing.assert_allclose(inside, ours, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, ours, rtol=1e-5, atol=1e-6)


def evaluated_by_another(strategy: str, other: str) -> Any:
    """A callback that evaluates with a Trainer of its own, which moves the model and closes."""
    import keras

    x, y = vectors(48)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if other:
                with trainer(other, 2) as its_own:
                    its_own.evaluate(self.model, (x, y))

    keras.utils.set_random_seed(0)
    with trainer(strategy, 2, (Evaluate(),), data__batch_size=16, trainer__epochs=3) as it:
        model = small_model()
        model.compile(keras.optimizers.Adam(0.01), model.loss)  # whose moments move too
        it.fit(model, (x, y))
        steps = int(it.model.optimizer.iterations.numpy())
        return steps, weights_of(it.model), it.predict(it.model, x)


@pytest.mark.parametrize("other", ["mirrored", "central_storage"])
def test_another_trainer_may_take_the_model_in_between(
    ranks: Callable[..., Any], other: str
) -> None:
    group = ranks(1, ONE_PROCESS)
    ((steps, weights, outputs),) = group.run(evaluated_by_another, "mirrored", other)
    ((_, undisturbed, expected),) = group.run(evaluated_by_another, "mirrored", "")
    assert steps == 9
    for mine, value in zip(weights, undisturbed, strict=True):
        np.testing.assert_array_equal(mine, value)
    np.testing.assert_array_equal(outputs, expected)


def normalised_weights(strategy: str) -> Any:
    """A layer that assigns its weight in every call."""
    import keras

    keras.utils.set_random_seed(0)
    x, y = vectors(32)
    with trainer(strategy, 2, data__batch_size=16) as it:
        inputs = keras.Input((8,))
        outputs = keras.layers.SpectralNormalization(keras.layers.Dense(3))(inputs)
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        it.fit(model, (x, y))
        return weights_of(model)


def test_a_layer_that_assigns_its_weight(ranks: Callable[..., Any]) -> None:
    group = ranks(1, ONE_PROCESS)
    (ours,) = group.run(normalised_weights, "mirrored")
    (reference,) = group.run(normalised_weights, "local")
    for mine, value in zip(ours, reference, strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5)


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


def test_random_states_go_on_from_prediction_to_prediction(ranks: Callable[..., Any]) -> None:
    ((first, second),) = ranks(1, ONE_PROCESS).run(random_outputs, "mirrored")
    ((reference, again),) = ranks(1, ONE_PROCESS).run(random_outputs, "local")
    assert np.abs(first - second).min() > 0
    assert np.abs(reference - again).min() > 0
