"""All ranks have rank 0's variables before the first step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.callbacks import BroadcastVariables
from ktrainer.errors import DivergenceError, ModelError
from tests.callbacks.helpers import data, everything, fit, small_model


class AtFirstBatch(keras.callbacks.Callback):
    """Everything there is when the first batch begins."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.seen = everything(self.model)


def _fit_from_different_weights(optimizer: str, dtype: str) -> tuple[list, list]:
    """Each rank has its own initial weights, seeds, optimizer slots and learning rate."""
    rank = distributed.current_world().rank
    keras.config.set_dtype_policy(dtype)
    model = small_model(keras.optimizers.get(optimizer), seed=rank)
    model.optimizer.learning_rate = 0.1 * (rank + 1)
    x, y = data(seed=rank)
    model.fit(x, y, batch_size=10, verbose=0)  # slots of its own
    mine, seen = everything(model), AtFirstBatch()
    fit(model, [BroadcastVariables(), seen])
    return mine, seen.seen


@pytest.mark.quick("sgd-mixed_bfloat16")
@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", "mixed_bfloat16"), ("adamw", "float64")])
def test_before_the_first_step(ranks, optimizer: str, dtype: str) -> None:
    (root, first), (other, second) = ranks(2).run(_fit_from_different_weights, optimizer, dtype)
    assert any(not np.array_equal(a, b) for a, b in zip(root, other, strict=True))
    for of_root, a, b in zip(root, first, second, strict=True):
        assert of_root.dtype == a.dtype == b.dtype
        assert of_root.tobytes() == a.tobytes() == b.tobytes()


def _of_own_weights(single: bool) -> list[tuple[float, float]]:
    """The losses that two models are found to have, and have with the weights of this rank."""
    from ktrainer import Trainer
    from ktrainer.script.batch_methods import BatchMethods

    x, y = np.arange(8, dtype="f").reshape(4, 2), np.ones((4, 1), "f")
    with Trainer({"backend": "data_parallel", "logging": {"progress": "none"}}) as trainer:
        models, losses, methods = [], [], BatchMethods(trainer)
        for number in range(2):
            keras.utils.set_random_seed(10 * number + trainer.world.rank)
            models.append(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
            models[-1].compile("sgd", "mse")
            losses.append(float(np.mean((x @ models[-1].get_weights()[0] - y) ** 2)))
        evaluate = methods.test_on_batch if single else trainer.evaluate
        predict = methods.predict_on_batch if single else trainer.predict
        evaluated = evaluate(models[0], x, y, return_dict=True)["loss"]
        predicted = np.mean((predict(models[1], x) - y) ** 2)
    return list(zip(map(float, (evaluated, predicted)), losses, strict=True))


@pytest.mark.parametrize("single", [False, True])
def test_before_the_first_evaluation(ranks, single: bool) -> None:
    for root, other in zip(*ranks(2).run(_of_own_weights, single), strict=True):
        assert root[0] == other[0] == pytest.approx(root[1], rel=1e-6)
        assert root[1] != other[1]


class MoreToTest(keras.Model):
    """Has a layer of which only `test_step` makes weights, and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.head = keras.Sequential([keras.layers.Rescaling(0.5), keras.layers.Dense(1)])

    def train_step(self, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.body(batch, training=True) ** 2)
        weights = self.body.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True),
        )
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"seen": tf.reduce_mean(self.head(batch))}


def _weights_of_test_step() -> tuple[bool, list[np.ndarray]]:
    from ktrainer import Trainer

    x = np.arange(8, dtype="f").reshape(4, 2)
    data = tf.data.Dataset.from_tensor_slices(x).batch(2)
    with Trainer({"backend": "data_parallel", "logging": {"progress": "none"}}) as trainer:
        model = MoreToTest()
        model.compile("sgd")
        keras.utils.set_random_seed(trainer.world.rank)
        trainer.fit(model, data)
        first = model.head.built
        trainer.fit(model, data, validation_data=data)
    return first, model.get_weights()


def test_layers_of_test_step_alone_are_made_later(ranks) -> None:
    (first, root), (_, other) = ranks(2).run(_weights_of_test_step)
    assert not first  # so the step before trains without them
    assert len(root) == len(other) == 4
    for a, b in zip(root, other, strict=True):
        assert np.array_equal(a, b)


def _restored_by_root(size_of_bucket: int) -> list:
    import ktrainer.distributed.array_transfer as arrays

    arrays.BUCKET_BYTES = size_of_bucket  # several messages, and arrays larger than one
    model = small_model(seed=3)
    callback = BroadcastVariables()
    callback.set_model(model)
    if distributed.current_world().is_root:
        for variable in model.weights:
            variable.assign(variable + 1.0)
    callback.on_restore(callback.progress)
    return everything(model)


@pytest.mark.exhaustive
def test_after_a_restore_on_rank_zero(ranks) -> None:
    every = ranks(3).run(_restored_by_root, 20)
    for other in every[1:]:
        for a, b in zip(every[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def _unbuilt(**compiled: Any) -> list:
    keras.utils.set_random_seed(distributed.current_world().rank)
    inner = [keras.layers.Dense(3), keras.layers.Dropout(0.3)]
    model = keras.Sequential([*inner, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **compiled)
    fit(model, [BroadcastVariables()], epochs=2)
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def test_a_model_without_an_input_layer(ranks) -> None:
    """As Horovod's examples have them: Keras makes the variables in the first step."""
    for each in ranks(2).run(_unbuilt):
        assert [v.tobytes() for v in each] == [v.tobytes() for v in _unbuilt()]


def test_an_eager_model_without_variables_is_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(_unbuilt, run_eagerly=True):
        assert isinstance(outcome.error, ModelError)
        assert "build" in str(outcome.error)
    _unbuilt(run_eagerly=True)  # nothing to broadcast in one process


def _normalised() -> np.ndarray:
    rank = distributed.current_world().rank
    normalise = keras.layers.Normalization()
    normalise.adapt(data(seed=rank)[0] * (rank + 1))  # each rank its own part of the data
    model = keras.Sequential([keras.Input((4,)), normalise])
    callback = BroadcastVariables()
    callback.set_model(model)
    callback.on_restore(callback.progress)
    return model.predict(data(seed=5)[0], verbose=0)


def test_normalization_computes_with_the_statistics_of_the_root(ranks) -> None:
    """Keras' layer computes with copies of its variables."""
    for found in ranks(2).run(_normalised):
        assert found.tobytes() == _normalised().tobytes()


def _different_models() -> None:
    units = 3 + distributed.current_world().rank
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fit(model, [BroadcastVariables()])


def test_different_variables_are_named(ranks) -> None:
    for outcome in ranks(2).outcomes(_different_models):
        assert isinstance(outcome.error, DivergenceError)
        assert "kernel float32[4, 3], rank 1 has" in str(outcome.error)
