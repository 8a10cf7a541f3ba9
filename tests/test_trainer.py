"""The calls of a Trainer, what they refuse and what they leave behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import (
    Callback,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PeerLost,
    Trainer,
)
from ktrainer.config.command_line import give_words
from tests.small import BATCH, Watch, build, data, fit, trainer

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
        with pytest.raises(CheckpointError, match=r"checkpoint export RUN NAME\.weights\.h5"):
            it.save(tmp_path / "saved" / "model.weights.h5")
    assert evaluated == model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    np.testing.assert_array_equal(predicted, model.predict(x, batch_size=BATCH, verbose=0))
    assert os.listdir(tmp_path / "saved") == ["model.keras"]


def test_save_watches_the_servers_that_it_reads_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `fit` does: a server that stopped is named, and TensorFlow does not wait for it."""

    @contextmanager
    def watching() -> Iterator[None]:
        yield
        assert (tmp_path / "model.keras").exists()
        raise PeerLost("the coordinator lost ps 0")

    with trainer() as it:
        it.fit(build, data())
        monkeypatch.setattr(it.backend, "watching", watching)
        with pytest.raises(PeerLost, match="ps 0"):
            it.save(tmp_path / "model.keras")


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


def test_predict_keeps_all_rows_of_an_output() -> None:
    """Of graphs, which have more nodes than edges; and it stops where a callback asks for it."""
    inputs = {"edges": keras.Input((2,), name="edges"), "nodes": keras.Input((3,), name="nodes")}
    model = keras.Model(inputs, {key: layers.Dense(2)(value) for key, value in inputs.items()})
    model.compile("sgd", "mse")
    random = np.random.default_rng(0)
    sizes = {"edges": (4, 2), "nodes": (5, 3)}
    graphs = [{key: random.normal(size=size) for key, size in sizes.items()} for _ in range(3)]

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            lambda: ((graph,) for graph in graphs),
            output_signature=({k: tf.TensorSpec((None, n)) for k, (_, n) in sizes.items()},),
        )

    class Stops(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    expected = model.predict(data(), verbose=0, callbacks=[Stops()])
    with trainer() as it:
        for _ in range(2):  # the second call does not find the model stopped
            predicted = it.predict(model, data(), callbacks=[Stops()])
    assert {key: len(rows) for key, rows in expected.items()} == {"edges": 8, "nodes": 10}
    for key, rows in expected.items():
        np.testing.assert_allclose(predicted[key], rows, rtol=1e-6)


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


class Looks(keras.callbacks.Callback):
    """Predicts with another model in every step, and has the third one end in NaN."""

    def __init__(self, it: Trainer, other: keras.Model) -> None:
        super().__init__()
        self.it, self.other = it, other

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.it.predict(self.other, data()[0])
        self.it.evaluate(self.other, data())
        assert self.it.model is self.model
        if batch == 2:
            self.model.layers[-1].bias.assign([np.nan] * 3)


@pytest.mark.filterwarnings("ignore:the loss is not finite:UserWarning")
def test_a_stop_means_the_model_that_is_trained() -> None:
    model, other = build(), build()
    with trainer(trainer__epochs=3, logging__every="1ba", health__nan="stop") as it:
        it.fit(model, data(), callbacks=[Looks(it, other)])
        assert it.progress.step == 3
        assert (model.stop_training, other.stop_training) == (True, False)
        it.predict(other, data()[0])
        assert it.model is other


def test_a_fit_inside_another_ends_with_its_error_alone() -> None:
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(DataError, match="no rows"):
                it.fit(build(), (np.ones((0, 6), "float32"), np.ones(0)), epochs=7)
            assert (it.config.trainer.epochs, it.model, it.progress.step) == (
                2,
                model,
                6 * epoch + 6,
            )

    model = build()
    with trainer(trainer__epochs=2) as it:
        assert it.fit(model, data(), callbacks=[Fails()]).epoch == [0, 1]
        assert it.state.fits == 1


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


def test_each_fit_has_files_of_its_own(tmp_path: Path) -> None:
    settings = {"logging__csv": "true", "logging__tensorboard": "true", "checkpoint__every": "1ep"}
    with trainer(run__dir=tmp_path / "run", trainer__epochs=2, **settings) as it:
        for _ in range(2):
            it.fit(build, data())
    names = ("metrics{}.csv", "throughput{}.jsonl", "tensorboard{}", "checkpoints{}")
    ours = {name.format(number) for name in names for number in ("", "-2")}
    assert ours <= set(os.listdir(tmp_path / "run"))
    for number in ("", "-2"):
        table = (tmp_path / "run" / f"metrics{number}.csv").read_text().splitlines()
        assert [line.split(",")[:3] for line in table[1:]] == [
            ["epoch", "1", "6"],
            ["epoch", "2", "12"],
        ]
        lines = (tmp_path / "run" / f"throughput{number}.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [0, 1]


def test_a_fit_that_is_refused_does_not_count(tmp_path: Path) -> None:
    x, y = data()
    with trainer(run__dir=tmp_path / "run", checkpoint__every="1ep") as it:
        with pytest.raises(DataError):
            it.fit(build, (x, y[:3]))
        it.fit(build, (x, y))
        assert it.state.fits == 1
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000006"]


def test_a_checkpoint_to_resume_is_for_the_first_fit(tmp_path: Path) -> None:
    with trainer(run__dir=tmp_path / "run", checkpoint__every="1ep") as it:
        it.fit(build, data())
    settings = {"checkpoint__resume": tmp_path / "run", "trainer__epochs": 2}
    with trainer(run__dir=tmp_path / "more", **settings) as it:
        it.fit(build, data())
        assert it.progress.step == 12
        with pytest.warns(UserWarning, match="number 2, which begins with the model as it is"):
            assert len(it.fit(build, data()).history["loss"]) == 2


def test_the_run_folder_is_made_even_if_nothing_else_writes(tmp_path: Path) -> None:
    fit(run__dir=tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_fast_dev_run_leaves_no_files(tmp_path: Path) -> None:
    with trainer(
        run__dir=tmp_path / "run",
        trainer__fast_dev_run="true",
        logging__csv="true",
        checkpoint__every="1ba",
    ) as it:
        it.fit(build, data())
    assert os.listdir(tmp_path) == []


def test_a_fast_dev_run_leaves_the_files_of_keras_callbacks_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()

    def callbacks(more: str) -> list[Any]:
        saves = keras.callbacks.ModelCheckpoint(mine / f"{more}.keras")
        saves.on_every_rank = True  # as `ktrainer run` sets it
        backup = keras.callbacks.BackupAndRestore(mine / "backup", delete_checkpoint=not more)
        return [saves, keras.callbacks.CSVLogger(mine / "log.csv"), backup]

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}

    with trainer(callbacks("best")) as it:
        it.fit(build, data())
    before, seen = files(), Watch()
    assert len(before) == 4
    with (
        trainer([*callbacks(""), seen], trainer__fast_dev_run=2) as it,
        pytest.warns(UserWarning, match="run: ModelCheckpoint, CSVLogger, BackupAndRestore$"),
    ):
        it.fit(build, data())
    assert files() == before
    assert seen.steps == [1, 2]


def test_callbacks_are_closed_after_an_error() -> None:
    class Fails(Callback):
        closed = 0

        def on_step_end(self, step: int, logs: Any = None) -> None:
            raise ValueError("enough")

        def close(self) -> None:
            self.closed += 1

    fails = Fails()
    with trainer([fails]) as it, pytest.raises(ValueError, match="enough"):
        it.fit(build, data())
    assert fails.closed == 1


def test_defaults_of_a_script_give_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {epochs: 4}\nbackend: local\n")
    defaults = {"trainer": {"epochs": 2, "max_steps": 9}, "seed": 3}
    words = ["--config", str(file), "seed=5", "logging.progress=none"]
    with Trainer.from_cli(argv=words, defaults=defaults) as it:
        assert (it.config.trainer.epochs, it.config.trainer.max_steps) == (4, 9)
        assert it.config.seed == 5


# What is refused


def test_training_without_the_words_of_the_launch_is_refused() -> None:
    model, (x, y) = build(), data()
    give_words(["trainer.epochs=3"])
    try:
        with trainer() as it:
            it.predict(model, x)  # as of a teacher
            for call in (lambda: it.fit(model, x, y), lambda: it.steps(x), lambda: it.run(len, x)):
                with pytest.raises(ConfigError, match=r"trainer\.epochs has no effect"):
                    call()
            with Trainer.from_cli(argv=["logging.progress=none"]) as other:
                assert other.config.trainer.epochs == 3
            it.fit(model, x, y)
    finally:
        give_words(())


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
        ({"backend": {"name": "tf_distribute", "strategy": "tpu"}}, "backend.strategy", "no TPU"),
        (
            {"backend": {"name": "pipeline", "partitions": 2}},
            "backend.partitions",
            "ktrainer run -n 2",
        ),
        ({"callbacks": {"mine": {"type": "nobody_registered_this"}}}, "callbacks", "nobody"),
    ],
    ids=str,
)
def test_a_bad_configuration(config: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Trainer(config)
    assert caught.value.path.startswith(path)
