"""The Trainer's settings, each against what it promises."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Callback, ConfigError, ModelError, Trainer

ROWS, BATCH = 24, 4  # six batches an epoch


def data(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype(keras.config.floatx())
    return x, random.integers(0, 3, rows)


def build(
    optimizer: keras.optimizers.Optimizer | None = None, eager: bool = True, **compiled: Any
) -> keras.Model:
    """A small model; eager, because tracing takes longer than the few steps of a test."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], **compiled}
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, run_eagerly=eager, **compiled)
    return model


def trainer(callbacks: Any = (), **settings: Any) -> Trainer:
    """A quiet Trainer; settings as `trainer__epochs=3`."""
    config = {
        "data": {"batch_size": BATCH, "shuffle": False},
        "logging": {"progress": "none", "csv": False},
        "checkpoint": {"resume": "never"},
    }
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return Trainer(config, callbacks, words)


def fit(
    model: Any = build, given: Any = None, validation: Any = None, **settings: Any
) -> tuple[Trainer, dict[str, list[float]]]:
    with trainer(**settings) as it:
        history = it.fit(model, given or data(), validation)
        return it, history.history


def weights(of: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for v in (of.model if isinstance(of, Trainer) else of).weights]


def close(ours: Any, theirs: Any, tolerance: float) -> None:
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Watch(Callback):
    """Writes down when things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.validated: list[int] = []
        self.inside: list[int] = []
        self.logged: list[int] = []
        self.tested = 0

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.batches.append(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self.validated.append(self.progress.step)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tested += 1

    def on_validation_end(self, step: int, logs: Any) -> None:
        assert all(key.startswith("val_") for key in logs)
        self.inside.append(step)

    def on_log(self, step: int, logs: Any) -> None:
        assert np.isfinite(list(logs.values())).all()
        self.logged.append(step)


def watch(validation: Any = None, **settings: Any) -> tuple[Watch, Trainer, dict[str, Any]]:
    seen = Watch()
    with trainer([seen], **settings) as it:
        history = it.fit(build, data(), validation)
        return seen, it, history.history


# How long


def test_epochs() -> None:
    seen, it, history = watch(trainer__epochs=3)
    assert len(history["loss"]) == 3
    assert seen.steps == list(range(1, 19))
    assert seen.batches == [0, 1, 2, 3, 4, 5] * 3
    assert (it.progress.epoch, it.progress.step, it.progress.examples) == (3, 18, 3 * ROWS)
    assert it.steps_per_epoch == 6


def test_max_steps_ends_in_the_middle_of_an_epoch() -> None:
    seen, it, history = watch(data(8), trainer__epochs=5, trainer__max_steps=8)
    assert seen.steps[-1] == it.progress.step == 8
    assert len(history["loss"]) == len(history["val_loss"]) == 2
    assert it.progress.examples == 8 * BATCH


def test_max_time() -> None:
    seen, _, history = watch(trainer__epochs=1000, trainer__max_time="0.2s")
    assert 1 <= len(seen.steps) < 6000
    assert len(history["loss"]) < 1000


def test_validate_every() -> None:
    seen, _, history = watch(data(8), trainer__epochs=4, trainer__validate_every="2ep")
    assert seen.validated == [12, 24]
    assert len(history["val_loss"]) == 2
    seen, _, history = watch(data(8), trainer__epochs=2, trainer__validate_every="4ba")
    assert seen.validated == seen.inside == [4, 8, 12]
    assert len(history["val_loss"]) == 1  # of the one that falls on an epoch's end
    seen, _, history = watch(data(8), trainer__validate_every="null")
    assert seen.validated == []
    assert list(history) == ["accuracy", "loss"]


def test_validation_inside_an_epoch_leaves_its_metrics_alone() -> None:
    _, plain = fit(trainer__epochs=2)
    _, _, history = watch(data(8), trainer__epochs=2, trainer__validate_every="4ba")
    assert {key: history[key] for key in plain} == plain


def test_logging_every() -> None:
    seen, _, _ = watch(trainer__epochs=2, logging__every="5ba")
    assert seen.logged == [5, 10]


@pytest.mark.parametrize(
    ("settings", "steps", "tested"),
    [
        ({"trainer__limit_train_batches": 2}, 2, 4),
        ({"trainer__limit_train_batches": 0.5}, 3, 4),
        ({"trainer__limit_val_batches": 1}, 6, 1),
        ({"trainer__limit_val_batches": 0.5}, 6, 2),
        ({"trainer__limit_val_batches": 0}, 6, 0),
        ({"trainer__fast_dev_run": "true", "trainer__epochs": 9}, 1, 1),
        ({"trainer__fast_dev_run": 2, "trainer__validate_every": "null"}, 2, 2),
    ],
    ids=str,
)
def test_limits(settings: dict[str, Any], steps: int, tested: int) -> None:
    seen, _, history = watch(data(16), **settings)
    assert (len(seen.steps), seen.tested) == (steps, tested)
    assert ("val_loss" in history) == (tested > 0)


def test_overfit_batches_are_the_same_every_epoch() -> None:
    x, y = data()
    ours, history = fit(
        given=(x, y), trainer__overfit_batches=2, trainer__epochs=3, data__shuffle="true"
    )
    model = build()
    theirs = model.fit(
        x[: 2 * BATCH], y[: 2 * BATCH], BATCH, epochs=3, shuffle=False, verbose=0
    ).history
    assert history == theirs
    close(ours, model, 0)


# How a step is made


@pytest.mark.parametrize("rows", [ROWS, 29])
def test_accumulation_equals_a_large_batch(rows: int) -> None:
    """29 rows: the last update has one part of one row."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras_adam = lambda: build(keras.optimizers.Adam(0.01), eager=False)  # noqa: E731
    one, large = fit(keras_adam, data(rows), trainer__epochs=2, data__batch_size=4 * BATCH)
    four, small = fit(keras_adam, data(rows), trainer__epochs=2, trainer__accumulate=4)
    assert four.progress.step == one.progress.step == 4
    close(four, one, 1e-13)
    for key in large:
        np.testing.assert_allclose(small[key], large[key], rtol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("global_norm", "global_clipnorm"), ("norm", "clipnorm"), ("value", "clipvalue")],
)
def test_clipping_equals_that_of_the_optimizer(ours: str, theirs: str) -> None:
    given = {"trainer__epochs": 2, f"trainer__clip__{ours}": 0.05}
    here, history = fit(**given)
    there, expected = fit(
        lambda: build(keras.optimizers.SGD(0.1, momentum=0.9, **{theirs: 0.05})), trainer__epochs=2
    )
    close(here, there, 1e-6)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)
    without, _ = fit(trainer__epochs=2)
    assert not np.allclose(weights(here)[0], weights(without)[0], atol=1e-3)


def test_hooks_see_gradients_before_they_are_clipped() -> None:
    class Twice(Callback):
        def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
            return [2.0 * gradient for gradient in gradients]

    with trainer([Twice()], trainer__clip__value=1e9) as it:
        it.fit(build(keras.optimizers.SGD(0.05)), data())
        doubled = weights(it)
    for a, b in zip(
        doubled, weights(fit(lambda: build(keras.optimizers.SGD(0.1)))[0]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_mixed_precision_keeps_variables_in_float32() -> None:
    it, history = fit(lambda: build(eager=False), trainer__precision="mixed_bfloat16")
    assert it.model.layers[0].compute_dtype == "bfloat16"
    assert {v.dtype for v in it.model.trainable_variables} == {"float32"}
    assert np.isfinite(history["loss"]).all()


def test_float16_skips_steps_that_overflow_and_lowers_the_scale() -> None:
    def linear() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = data()
    x[5] = 100.0  # its loss is finite in 16 bits, its scaled gradients are not
    it, _ = fit(linear, (x, y), trainer__precision="mixed_float16")
    optimizer = it.model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(optimizer.dynamic_scale) == optimizer.initial_scale / 2
    assert int(optimizer.inner_optimizer.iterations) == 5
    assert all(np.isfinite(value).all() for value in weights(it))


def test_precision_of_a_model_made_before_the_trainer() -> None:
    model = build()
    with (
        trainer(trainer__precision="mixed_bfloat16") as it,
        pytest.raises(ModelError, match="Make the Trainer before the model"),
    ):
        it.fit(model, data())


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer__xla": "true"},
        {"trainer__xla": "true", "trainer__accumulate": 2, "data__batch_size": 2},
        {"trainer__steps_per_call": 3},
        {"trainer__steps_per_call": 4, "trainer__clip__norm": 1e9},
    ],
    ids=str,
)
def test_what_makes_steps_faster_does_not_change_them(settings: dict[str, Any]) -> None:
    ours, history = fit(lambda: build(eager=False), data(26), trainer__epochs=2, **settings)
    plain, expected = fit(given=data(26), trainer__epochs=2)
    close(ours, plain, 1e-5)
    assert ours.progress == _same_time(plain.progress, ours.progress)
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-5)


def _same_time(progress: Any, other: Any) -> Any:
    progress.elapsed = other.elapsed
    return progress


def test_steps_per_call_is_seen_by_callbacks() -> None:
    seen = Watch()
    settings = {"trainer__epochs": 2, "trainer__steps_per_call": 4, "trainer__max_steps": 11}
    with trainer([seen], **settings) as it:
        it.fit(build(eager=False), data())
    assert seen.steps == [4, 6, 10, 11]
    assert seen.batches == [3, 5, 3, 4]


# What repeats


def test_a_seed_fixes_weights_and_order() -> None:
    def unseeded() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5)])
        model.add(layers.Dense(3))
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return model

    first, second, other = (
        weights(fit(unseeded, seed=seed, data__shuffle="true")[0]) for seed in (1, 1, 2)
    )
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (first[0] == other[0]).all()


def test_shuffling_draws_another_order_every_epoch() -> None:
    rows: list[float] = []

    class Order(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            if tf.executing_eagerly():
                rows.extend(batch[0][:, 0].numpy().tolist())
            return {"loss": 0.0}

    model = Order()
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(12.0, dtype="float32")[:, None]
    fit(model, (x, x), trainer__epochs=2, data__shuffle="true")
    assert sorted(rows[:12]) == sorted(rows[12:]) == x[:, 0].tolist()
    assert rows[:12] != rows[12:]


def test_deterministic() -> None:
    both = [
        fit(lambda: build(eager=False), trainer__deterministic="true", data__shuffle="true")
        for _ in range(2)
    ]
    close(both[0][0], both[1][0], 0)
    assert both[0][1] == both[1][1]


# The other calls


def test_evaluate_predict_and_save(tmp_path: Path) -> None:
    x, y = data(30)
    model = build()
    with trainer() as it:
        with pytest.raises(ModelError, match="no model"):
            it.save(tmp_path / "saved" / "early.keras")
        it.fit(model, data())
        evaluated = it.evaluate(model, (x, y))
        predicted = it.predict(model, x)
        it.save(tmp_path / "saved" / "model.keras")
    assert evaluated == model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    np.testing.assert_array_equal(predicted, model.predict(x, batch_size=BATCH, verbose=0))
    assert os.listdir(tmp_path / "saved") == ["model.keras"]


# Keras makes NumPy arrays of its variables as it saves and loads them.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_model_is_one_of_keras(tmp_path: Path) -> None:
    with trainer() as it:
        it.fit(build, data())
        it.save(tmp_path / "model.keras")
        expected = it.predict(it.model, data()[0])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(data()[0], batch_size=BATCH, verbose=0), expected)
    assert int(loaded.optimizer.iterations) == 6


def test_predict_nested_outputs() -> None:
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    outputs = {"sum": layers.add([layers.Dense(1)(inputs[key]) for key in "ab"]), "b": inputs["b"]}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", run_eagerly=True)
    x = {"a": np.ones((7, 2), "float32"), "b": np.arange(21.0, dtype="float32").reshape(7, 3)}
    with trainer() as it:
        predicted = it.predict(model, x)
    assert predicted["sum"].shape == (7, 1)
    np.testing.assert_array_equal(predicted["b"], x["b"])


def test_evaluate_before_fit_and_after_another_model() -> None:
    x, y = data()
    with trainer() as it:
        first, second = build(), build(keras.optimizers.Adam(0.1))
        before = it.evaluate(first, (x, y))
        it.fit(second, (x, y))
        assert it.evaluate(first, (x, y)) == before
        assert it.evaluate(second, (x, y)) != before


def test_two_models_one_after_the_other() -> None:
    with trainer(trainer__epochs=2) as it:
        first = it.fit(build, data()).history
        second = it.fit(build, data()).history
        assert it.progress.step == 12
    assert first == second


def test_callbacks_of_the_trainer_and_of_the_call() -> None:
    always, once = Watch(), Watch()
    with trainer([always]) as it:
        it.fit(build, data(), callbacks=[once])
        it.fit(build, data())
    assert (len(always.steps), len(once.steps)) == (12, 6)


def test_the_run_folder_says_what_ran(tmp_path: Path) -> None:
    with trainer(run__dir=tmp_path / "run") as it:
        assert it.run_dir == tmp_path / "run"
        assert {"config.yaml", "config.diff.yaml", "versions.json"} <= set(os.listdir(it.run_dir))


# What is refused


def test_an_uncompiled_model() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    with trainer() as it, pytest.raises(ModelError, match=r"not compiled; call model\.compile"):
        it.fit(model, data())


@pytest.mark.parametrize("model", [3, lambda: "model"], ids=["number", "function"])
def test_what_is_not_a_model(model: Any) -> None:
    with trainer() as it, pytest.raises(ModelError, match=r"expected a keras\.Model"):
        it.fit(model, data())


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        ({"trainer": {"epoch": 3}}, "trainer.epoch", "epochs"),
        ({"trainer": {"epochs": "many"}}, "trainer.epochs", "many"),
        ({"trainer": {"max_time": "3ep"}}, "trainer.max_time", "3ep"),
        ({"trainer": {"clip": {"norm": 1, "value": 1}}}, "trainer.clip", "norm"),
        (
            {"trainer": {"accumulate": 2, "steps_per_call": 2}},
            "trainer.steps_per_call",
            "accumulate",
        ),
        ({"backend": "dataparallel"}, "backend", "data_parallel"),
        ({"backend": {"name": "pipeline", "partitions": 2}}, "backend", "not part of this version"),
        ({"callbacks": {"mine": {"type": "nobody_registered_this"}}}, "callbacks", "nobody"),
    ],
    ids=str,
)
def test_a_bad_configuration(config: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Trainer(config)
    assert caught.value.path.startswith(path)


# What is left behind


def cycles(backend: str, count: int) -> list[tuple[int, int, int]]:
    """Files, threads of Python and threads in all, after each of some fits."""
    seen = []
    process = psutil.Process()
    for _ in range(count):
        with trainer(backend=backend, trainer__limit_train_batches=1) as it:
            it.fit(build, data(), data(4))
        keras.utils.clear_session()
        seen.append((process.num_fds(), threading.active_count(), process.num_threads()))
    return seen


def test_cycles_leave_nothing_behind() -> None:
    seen = cycles("local", 20)
    assert len(set(seen[3:])) == 1, seen


def test_cycles_on_ranks_leave_nothing_behind(ranks: Callable[..., Any]) -> None:
    for seen in ranks(2).run(cycles, "data_parallel", 20, deadline=120):
        assert len(set(seen[3:])) == 1, seen
