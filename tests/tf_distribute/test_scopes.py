"""Models made, compiled, trained and used inside of strategies' scopes: one process's numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import use_float64
from tests.tf_distribute.running import ONE_PROCESS, make_devices, under
from tests.tf_distribute.test_features import trainer

ROWS = 41
_found: dict[Any, Any] = {}  # what trainings in one process gave, by function and arguments
PLACES = ["trainer's scope", "a strategy's scope", "tf.device"]


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 8))
    return x, (x @ random.normal(size=(8, 3))).argmax(-1)


def classifier(normalised: bool = True) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    middle = [keras.layers.BatchNormalization(synchronized=True)] if normalised else []
    layers = [keras.layers.Dense(8, activation="tanh"), *middle, keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def place(name: str, it: Any) -> Any:
    import tensorflow as tf

    if name == "trainer's scope":
        return it.scope()
    if name == "a strategy's scope":
        return tf.distribute.MirroredStrategy(["CPU:2", "CPU:3"]).scope()
    return tf.device("/device:CPU:1") if name else nullcontext()


def everything_inside(backend: str, where: str, folder: str) -> Any:
    """Build, train twice, evaluate, predict and save, all in one scope; arrays and datasets."""
    import keras
    import tensorflow as tf

    make_devices()
    use_float64()
    x, y = rows()
    found: list[Any] = []
    words = {"data__batch_size": 16, "trainer__epochs": 2, "run__dir": f"{folder}/runs"}
    with trainer(backend, 1 if backend == "one_device" else 2, **words) as it:
        with place(where, it):
            strategy = tf.distribute.get_strategy()
            model = classifier()
            found += [it.fit(model, (x, y), validation_data=(x, y)).history]
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
            found += [it.fit(model, data, validation_data=data).history]
            found += [it.evaluate(model, (x, y)), it.predict(model, x)]
            it.save(f"{folder}/model.keras")
            with pytest.raises(ValueError, match="incompatible"):
                it.evaluate(model, (x[:, :3], y))
            assert tf.distribute.get_strategy() is strategy  # after an error, too
        found += [[v.numpy() for v in model.variables]]
    assert {type(v.value).__name__ for v in model.variables} == {"ResourceVariable"}
    keras.models.load_model(f"{folder}/model.keras")
    return found


def in_one_process(ranks: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """What `function` finds under `backend=local`; once for the same arguments."""
    key = (function, *args)
    if key not in _found:
        (_found[key],) = under(ranks, "local", function, "local", *args)
    return _found[key]


def same(ours: Any, truth: Any) -> None:
    import keras

    def equal(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)

    keras.tree.map_structure(equal, ours, truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "where"),
    [*(("mirrored", where) for where in PLACES), ("local", PLACES[1])],
)
def test_inside_of_a_scope(
    ranks: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    backend: str,
    where: str,
) -> None:
    (ours,) = under(ranks, backend, everything_inside, backend, where, str(tmp_path))
    truth = in_one_process(ranks, everything_inside, "", str(tmp_path_factory.getbasetemp()))
    assert truth[0]["val_loss"][1] > 0.1
    same(ours, truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["multi_worker_mirrored", "data_parallel"])
def test_inside_of_a_scope_of_two_processes(
    ranks: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    backend: str,
) -> None:
    words = (everything_inside, backend, PLACES[0], str(tmp_path))
    truth = in_one_process(ranks, everything_inside, "", str(tmp_path_factory.getbasetemp()))
    if backend == "data_parallel":  # in processes that have devices for strategies
        by_rank = ranks(2, ONE_PROCESS).run(*words, deadline=120)
    else:
        by_rank = under(ranks, backend, *words)
    for ours in by_rank:
        same(ours, truth)


def own_compile(backend: str, inside: bool) -> Any:
    """A GAN whose `compile` takes two optimizers and makes metrics; all of it is built lazily."""
    import keras
    import tensorflow as tf
    from keras import layers

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.critic = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
            self.maker = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(2)])

        def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
            self.d_metric = keras.metrics.Mean(name="d_loss")
            self.g_metric = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.d_metric, self.g_metric]

        def train_step(self, data: Any) -> dict[str, Any]:
            noise, real = data
            ones = tf.ones_like(real[:, :1])
            with tf.GradientTape() as tape:
                guesses = self.critic(real), self.critic(self.maker(noise))
                d_loss = self.loss_fn(ones, guesses[0]) + self.loss_fn(0 * ones, guesses[1])
            weights = self.critic.trainable_weights
            pairs = zip(tape.gradient(d_loss, weights), weights, strict=True)
            self.d_optimizer.apply_gradients(pairs)
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(ones, self.critic(self.maker(noise)))
            weights = self.maker.trainable_weights
            pairs = zip(tape.gradient(g_loss, weights), weights, strict=True)
            self.g_optimizer.apply_gradients(pairs)
            self.d_metric.update_state(d_loss)
            self.g_metric.update_state(g_loss)
            return {metric.name: metric.result() for metric in self.metrics}

    def build() -> Any:
        keras.utils.set_random_seed(2)
        gan = Gan()
        adam, loss = keras.optimizers.Adam, keras.losses.BinaryCrossentropy(from_logits=True)
        gan.compile(d_optimizer=adam(0.01), g_optimizer=adam(0.02), loss_fn=loss)
        return gan

    use_float64()
    random = np.random.default_rng(0)
    data = random.normal(size=(ROWS, 3)), random.normal(size=(ROWS, 2))
    with trainer(backend, 2, data__batch_size=16, trainer__epochs=2) as it:
        if inside:
            with it.scope():
                history = it.fit(build(), data).history
        else:
            history = it.fit(build, data).history
        return history, [v.numpy() for v in it.model.trainable_variables]


@pytest.mark.exhaustive
def test_a_gan_with_a_compile_of_its_own(ranks: Callable[..., Any]) -> None:
    (truth,) = under(ranks, "local", own_compile, "local", False)
    for name in ("multi_worker_mirrored", "mirrored"):
        for ours in under(ranks, name, own_compile, name, True, deadline=150):
            same(ours, truth)


def made_elsewhere(
    backend: str, strategy: str, trained: bool, compiled: bool, normalised: bool = True
) -> Any:
    """A model made in a scope of the user's own, and trained there by Keras; then by us."""
    import keras
    import tensorflow as tf

    if backend not in ("data_parallel", "pipeline"):
        make_devices()
    use_float64()
    x, y = rows()
    scope: Any = nullcontext()
    if strategy == "mirrored":
        scope = tf.distribute.MirroredStrategy(["CPU:2", "CPU:3"]).scope()
    elif strategy:
        scope = tf.distribute.OneDeviceStrategy("CPU:0").scope()
    with scope:
        model = classifier(normalised)
        if trained:
            model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
        if not compiled:
            model.optimizer = None
    if not compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    with trainer(backend, 2, data__batch_size=16, trainer__epochs=2) as it:
        history = it.fit(model, (x, y), validation_data=(x, y)).history
        evaluated = it.evaluate(model, (x, y))
        held = [] if backend == "pipeline" else [v.numpy() for v in model.variables]
    if held:  # an ordinary model again, for Keras too
        held += [model.predict(x, verbose=0)]
        assert {type(v.value).__name__ for v in model.variables} == {"ResourceVariable"}
    return history, evaluated, held


@pytest.mark.exhaustive
@pytest.mark.parametrize(("trained", "compiled"), [(True, True), (False, False)])
def test_a_model_of_a_strategy_of_the_users_own(
    ranks: Callable[..., Any], trained: bool, compiled: bool
) -> None:
    truth = in_one_process(ranks, made_elsewhere, "", trained, compiled)
    for backend in ("local", "mirrored"):
        (ours,) = under(ranks, backend, made_elsewhere, backend, "mirrored", trained, compiled)
        same(ours, truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["data_parallel", "pipeline"])
def test_a_model_of_a_strategy_of_the_users_own_on_ranks(
    ranks: Callable[..., Any], backend: str
) -> None:
    """A pipeline normalises by microbatches."""
    words = (True, True, backend != "pipeline")
    truth = in_one_process(ranks, made_elsewhere, "", *words)
    for ours in under(ranks, backend, made_elsewhere, backend, "one device", *words):
        same((*ours[:2], ours[2] or truth[2]), truth)


def without_a_strategy(backend: str) -> str:
    """`scope()` does nothing where nothing is distributed; what needs a strategy says so."""
    import tensorflow as tf

    from ktrainer import ConfigError

    with trainer(backend, 2) as it:
        with it.scope():
            assert not tf.distribute.has_strategy()
            assert it.scope() is not None  # and may be entered as often as one likes
        with pytest.raises(ConfigError) as caught:
            it.strategy  # noqa: B018
    return str(caught.value)


@pytest.mark.parametrize("backend", ["data_parallel", "pipeline"])
def test_a_scope_without_a_strategy(ranks: Callable[..., Any], backend: str) -> None:
    for said in under(ranks, backend, without_a_strategy, backend):
        assert f"{backend} has no tf.distribute strategy" in said
        assert "backend=tf_distribute" in said


def devices_of_steps(backend: str, where: str) -> set[str]:
    """The `tf.device(...)` in which steps are called, empty where TensorFlow chooses."""
    import keras
    from tensorflow.python.eager import context

    make_devices()
    found = set()

    class Watched(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            found.add(context.context().device_name)
            return super().train_step(data)

    x, y = rows()
    with trainer(backend, 1, data__batch_size=16) as it, place(where, it):
        model = Watched([keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        it.fit(model, (x, y))
    return {name.rpartition("/")[2] for name in found}


@pytest.mark.parametrize(("where", "device"), [("", ""), ("tf.device", "device:CPU:1")])
def test_the_device_of_steps_is_left_to_tensorflow_and_the_caller(
    ranks: Callable[..., Any], where: str, device: str
) -> None:
    """The first CPU's name would keep all steps from a GPU."""
    (found,) = under(ranks, "local", devices_of_steps, "local", where)
    assert found == {device}
