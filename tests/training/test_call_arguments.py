"""`Trainer.fit` with the arguments of `Model.fit`: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.errors import ConfigError, DataError
from tests.contracts.running import Outcome, assert_same, outcome_of, use_float64

ROWS = 23
Make = Callable[[], dict[str, Any]]


@pytest.fixture(autouse=True)
def _float64() -> None:
    use_float64()


@pytest.fixture
def quiet(tmp_path: Any) -> dict[str, Any]:
    return {"run": {"dir": str(tmp_path)}, "logging": {"progress": "none", "csv": False}}


def arrays(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return x, x @ random.normal(size=(3, 2)) + 1


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    model.add(keras.layers.Dropout(0.2))
    model.add(keras.layers.Dense(2))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def two_by_two() -> keras.Model:
    inputs = [keras.Input((3,)), keras.Input((3,))]
    hidden = keras.layers.Add()([keras.layers.Dense(4)(part) for part in inputs])
    model = keras.Model(inputs, [keras.layers.Dense(2, name=name)(hidden) for name in "ab"])
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.3])
    return model


def keras_fits(make: Make, builder: Callable[[], keras.Model], times: int) -> list[Outcome]:
    """What a model is after each of several fits."""
    keras.utils.set_random_seed(1)
    model = builder()
    return [outcome_of(model, model.fit(**{"verbose": 0} | make())) for _ in range(times)]


def trainer_fits(
    settings: dict[str, Any], make: Make, builder: Callable[[], keras.Model], times: int
) -> list[Outcome]:
    with Trainer(settings) as trainer:
        keras.utils.set_random_seed(1)
        model = builder()
        every = {"verbose": 0}
        return [outcome_of(model, trainer.fit(model, **every | make())) for _ in range(times)]


def keras_fit(make: Make, builder: Callable[[], keras.Model] = build) -> Outcome:
    return keras_fits(make, builder, 1)[0]


def trainer_fit(
    settings: dict[str, Any], make: Make, builder: Callable[[], keras.Model] = build
) -> Outcome:
    return trainer_fits(settings, make, builder, 1)[0]


def xy(**more: Any) -> dict[str, Any]:
    x, y = arrays()
    return {"x": x, "y": y, "epochs": 3, **more}


CASES: dict[str, Make] = {
    "shuffled": lambda: xy(batch_size=5),
    "shuffled within batches": lambda: xy(batch_size=5, shuffle="batch"),
    "validation batches": lambda: xy(
        batch_size=5, validation_data=arrays(9, 1), validation_batch_size=2, validation_steps=3
    ),
    "validation data in a list": lambda: xy(validation_data=[*arrays(9, 1), np.linspace(0, 2, 9)]),
    "validation steps alone": lambda: xy(validation_data=arrays(9, 1), validation_steps=2),
    "validation of some epochs": lambda: xy(
        batch_size=5, epochs=5, validation_split=0.3, validation_freq=[1, 4]
    ),
    "in order, validation every 2 epochs": lambda: xy(
        batch_size=5, epochs=5, shuffle=False, validation_split=0.3, validation_freq=2
    ),
    "sample weights": lambda: xy(batch_size=5, sample_weight=np.linspace(0.0, 2.0, ROWS)),
    "weights and split": lambda: xy(
        batch_size=5, sample_weight=np.linspace(0.5, 2.0, ROWS), validation_split=0.3
    ),
    "initial epoch": lambda: xy(batch_size=5, initial_epoch=2, epochs=5),
    "tf tensors": lambda: {
        "x": tf.constant(arrays()[0]), "y": tf.constant(arrays()[1]), "batch_size": 5, "epochs": 2
    },
}  # fmt: skip


@pytest.mark.quick("sample weights")
@pytest.mark.parametrize("name", CASES)
def test_arrays(name: str, quiet: dict[str, Any]) -> None:
    """In a first fit, and in one that follows it."""
    theirs = keras_fits(CASES[name], build, 2)
    for ours, expected in zip(trainer_fits(quiet, CASES[name], build, 2), theirs, strict=True):
        assert_same(ours, expected)


STEPS: dict[str, Make] = {
    "fewer than batches": lambda: xy(batch_size=5, steps_per_epoch=2, epochs=7),
    "dividing": lambda: xy(batch_size=6, steps_per_epoch=2, epochs=5),
    "more than batches": lambda: xy(batch_size=5, steps_per_epoch=9),
    "of no size": lambda: xy(steps_per_epoch=4),
    "dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=2).batch(5),
        "epochs": 7,
        "steps_per_epoch": 2,
        "shuffle": False,
    },
    "repeated dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices(arrays()).repeat().shuffle(ROWS, seed=2).batch(5),
        "epochs": 3,
        "steps_per_epoch": 2,
        "shuffle": False,
    },
}


@pytest.mark.quick("repeated dataset")
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", STEPS)
def test_steps_per_epoch(name: str, quiet: dict[str, Any]) -> None:
    assert_same(trainer_fit(quiet, STEPS[name]), keras_fit(STEPS[name]))


def test_several_inputs_and_outputs(quiet: dict[str, Any]) -> None:
    x, y = arrays()
    weights = [np.linspace(0.0, 1.0, ROWS), np.linspace(1.0, 0.0, ROWS)]

    def make() -> dict[str, Any]:
        return {"x": [x, x + 1], "y": [y, y - 1], "sample_weight": weights, "batch_size": 5}

    assert_same(trainer_fit(quiet, make, two_by_two), keras_fit(make, two_by_two))


def test_sample_weights_go_with_a_tuple(quiet: dict[str, Any]) -> None:
    weights = np.linspace(0.0, 2.0, ROWS)
    theirs = keras_fit(lambda: xy(sample_weight=weights))
    given = {"x": (*arrays(), weights), "epochs": 3}
    assert_same(trainer_fit(quiet, lambda: given), theirs)


def test_frames_and_series(quiet: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")

    def make() -> dict[str, Any]:
        x, y = arrays()
        frame = pandas.DataFrame(x.astype("float32"), columns=list("abc"))
        weights = pandas.Series(np.linspace(0.0, 2.0, ROWS))
        return {"x": frame, "y": pandas.DataFrame(y), "sample_weight": weights, "batch_size": 5}

    def one_target() -> dict[str, Any]:
        given = make()
        del given["sample_weight"]
        return given | {"y": given["x"]["a"] > 0, "class_weight": {0: 1.0, 1: 3.0}}

    def classifier() -> keras.Model:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
        return model

    assert_same(trainer_fit(quiet, make), keras_fit(make))
    assert_same(trainer_fit(quiet, one_target, classifier), keras_fit(one_target, classifier))


def graphs() -> tf.data.Dataset:
    """Batches whose parts have different first axes, as of a graph."""
    random = np.random.default_rng(0)

    def one() -> Any:
        for edges in (4, 7, 5):
            pairs = random.integers(0, 6, (edges, 2))
            yield {"nodes": random.normal(size=(6, 3)), "edges": pairs}, np.ones((1, 1))

    signature = (
        {"nodes": tf.TensorSpec((6, 3), tf.float64), "edges": tf.TensorSpec((None, 2), tf.int64)},
        tf.TensorSpec((1, 1), tf.float64),
    )
    batches = list(one())
    made = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(batches)))


class OfGraphs(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: dict[str, Any]) -> Any:
        ends = keras.ops.take(inputs["nodes"], inputs["edges"][:, 1], axis=0)
        return keras.ops.sum(self.dense(ends), axis=0, keepdims=True)


def of_graphs() -> keras.Model:
    model = OfGraphs()
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_graphs_in_one_process(quiet: dict[str, Any]) -> None:
    def make() -> dict[str, Any]:
        return {"x": graphs(), "epochs": 2, "shuffle": False}

    assert_same(trainer_fit(quiet, make, of_graphs), keras_fit(make, of_graphs))


class TestBatches(keras.callbacks.Callback):
    __test__ = False
    seen = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1


def test_validation_batches_beside_steps_per_epoch(quiet: dict[str, Any]) -> None:
    ours, theirs = TestBatches(), TestBatches()
    given = {"steps_per_epoch": 4, "validation_data": arrays(40, 1), "verbose": 0}
    build().fit(*arrays(), callbacks=[theirs], **given)
    with Trainer(quiet) as trainer:
        trainer.fit(build(), *arrays(), callbacks=[ours], **given)
    assert ours.seen == theirs.seen == 2


def test_fewer_batches_than_steps_per_epoch(quiet: dict[str, Any]) -> None:
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(5).take(3)
    with Trainer(quiet) as trainer:
        with pytest.warns(UserWarning, match="it has 3 batches, fewer than steps_per_epoch=5"):
            trainer.fit(build(), data, steps_per_epoch=5, epochs=2, verbose=0)
        assert trainer.progress.step == 6


def test_a_generator_that_ends_before_the_steps_of_an_epoch(quiet: dict[str, Any]) -> None:
    with Trainer(quiet) as trainer:
        for batches, epoch in ((3, 1), (5, 2), (7, 2)):
            data = (arrays(5, number) for number in range(batches))
            with pytest.warns(UserWarning, match=f"ran out of data in epoch {epoch}, before its 5"):
                trainer.fit(build(), data, steps_per_epoch=5, epochs=3, verbose=0)
            assert trainer.progress.step == batches
        trainer.fit(build(), (arrays(5, number) for number in range(3)), epochs=2, verbose=0)


ENDLESS: dict[str, Callable[[], Any]] = {
    "tf.data": lambda: tf.data.Dataset.from_tensor_slices(arrays()).repeat().batch(5),
    "PyDataset": lambda: Endless(),
}


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return arrays(5, index)


@pytest.mark.parametrize("name", ENDLESS)
def test_data_without_an_end(name: str, quiet: dict[str, Any]) -> None:
    make = ENDLESS[name]
    with Trainer(quiet) as trainer:
        with pytest.raises(DataError, match=r"never ends.*steps_per_epoch.*limit_train.*max_steps"):
            trainer.fit(build(), make())
        with pytest.raises(DataError, match=r"never ends.*validation_steps.*limit_val"):
            trainer.fit(build(), arrays(), validation_data=make())
        with pytest.raises(DataError, match=r"never ends.*steps=\.\.\."):
            trainer.evaluate(build(), make())
        history = trainer.fit(build(), make(), steps_per_epoch=2, epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2
        assert trainer.predict(build(), make(), steps=3).shape == (15, 2)
    with Trainer(quiet, overrides=["trainer.max_steps=3"]) as trainer:
        trainer.fit(build(), make(), verbose=0)
        assert trainer.progress.step == 3


@pytest.fixture
def limits() -> Iterator[None]:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.usefixtures("limits")
@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data:UserWarning")
def test_keras_limits_for_debugging(quiet: dict[str, Any]) -> None:
    def make() -> dict[str, Any]:
        return xy(batch_size=5, epochs=4, validation_data=arrays(9, 1), validation_batch_size=2)

    with pytest.warns(UserWarning, match="Limiting epochs to 2"):
        ours = trainer_fit(quiet, make)
    assert_same(ours, keras_fit(make))
    x, y = arrays()
    with Trainer(quiet, overrides=["trainer.epochs=5", "trainer.limit_train_batches=4"]) as trainer:
        model = build()
        assert trainer.fit(model, x, y, batch_size=5).epoch == [0, 1]
        assert trainer.progress.step == 6
        expected = model.evaluate(x, y, 5, 0, return_dict=True)
        assert trainer.evaluate(model, x, y, 5) == expected
        assert len(trainer.predict(model, x, 5)) == len(model.predict(x, 5, 0)) == 15
    for fraction, steps in ((0.1, 2), (0.9, 3)):
        words = [f"trainer.limit_train_batches={fraction}", "trainer.epochs=1"]
        with Trainer(quiet, overrides=words) as trainer:
            trainer.fit(build(), x, y, batch_size=1)
            assert trainer.progress.step == steps


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no data": ({}, DataError, "there is no data"),
    "y beside a dataset": (
        {"x": ENDLESS["tf.data"](), "y": 1, "steps_per_epoch": 1}, DataError, "leave the argument"
    ),
    "split of a dataset": (
        {"x": ENDLESS["tf.data"](), "validation_split": 0.1}, DataError, "needs arrays"
    ),
    "split of everything": (xy(validation_split=1.5), DataError, "between 0 and 1"),
    "split to nothing": (xy(validation_split=0.999), DataError, "not sufficient"),
    "both weights": (
        xy(sample_weight=np.ones(ROWS), class_weight={0: 1.0}), DataError, "exclude each other"
    ),
    "batch size": (xy(batch_size=0), ConfigError, "batch_size is a whole number, at least 1"),
    "steps": (xy(steps_per_epoch=2.5), ConfigError, "steps_per_epoch is a whole number"),
    "verbose": (xy(verbose=7), ConfigError, "verbose is 0, 1, 2 or 'auto'"),
    "frequency": (xy(validation_freq=0), ConfigError, "validation_freq"),
    "rows": ({"x": np.ones((4, 3)), "y": np.ones((3, 2))}, DataError, "same number of rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together(name: str, quiet: dict[str, Any]) -> None:
    arguments, kind, message = WRONG[name]
    with Trainer(quiet) as trainer, pytest.raises(kind, match=message):
        trainer.fit(build(), **arguments)


def test_file_and_command_line_win_over_a_call(
    quiet: dict[str, Any], tmp_path: Any, capsys: Any
) -> None:
    """A file and the command line win over a call, and a call over the script's own dict."""
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path}}}\ndata: {{batch_size: 23}}\nlogging: {{csv: false}}")
    x, y = arrays()
    with Trainer(str(file), overrides=["trainer.epochs=2"]) as trainer:
        history = trainer.fit(build(), x, y, batch_size=5, epochs=4, verbose=2)
        assert (history.epoch, trainer.progress.step) == ([0, 1], 2)
        shown = capsys.readouterr().out
        assert "  epochs: 2 (command line) instead of 4 (fit)\n" in shown
        assert f"  batch_size: 23 ({file}) instead of 5 (fit)\n" in shown
        saved = (tmp_path / "config.yaml").read_text()
        assert "progress: plain" in saved
        assert trainer.config.logging.progress == "auto"  # again, after the call
        for _ in range(2):
            trainer.evaluate(trainer.model, x, y, batch_size=5)
        trainer.predict(trainer.model, x, batch_size=5)
        shown = capsys.readouterr().out
        for call in ("evaluate", "predict"):
            assert shown.count(f"batch_size: 23 ({file}) instead of 5 ({call})\n") == 1
    with Trainer({**quiet, "trainer": {"epochs": 9}}) as trainer:
        assert trainer.fit(build(), x, y, epochs=1).epoch == [0]
        assert trainer.fit(build(), x, y, epochs=2).epoch == [0, 1]


def test_arguments_by_position(quiet: dict[str, Any]) -> None:
    x, y = arrays()
    calls: list[int] = []
    counts = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(epoch))
    with Trainer(quiet) as trainer:
        model = build()
        trainer.fit(model, x, y, 5, 2, 0, counts)
        trainer.fit(model, x, y, 5, 1, 0, [counts])
        assert calls == [0, 1, 0]
        expected = model.evaluate(x, y, 7, 0)
        assert trainer.evaluate(model, x, y, 7, 0, return_dict=False) == expected
        expected = model.evaluate(x, y, 7, 0, np.ones(ROWS), 2, return_dict=True)
        assert trainer.evaluate(model, x, y, 7, 0, np.ones(ROWS), 2) == expected
        np.testing.assert_array_equal(trainer.predict(model, x, 7, 0, 2), model.predict(x, 7, 0, 2))


def test_params_of_callbacks_are_those_of_the_call(quiet: dict[str, Any]) -> None:
    x, y = arrays()
    found: list[Any] = []
    look = keras.callbacks.LambdaCallback()
    look.on_test_begin = look.on_predict_begin = lambda logs=None: found.append(look.params)
    with Trainer(quiet) as trainer:
        model = build()
        trainer.fit(model, x, y, 5, 3, 0, [look])
        found.clear()
        for methods in (trainer, model):
            given = [model] if methods is trainer else []
            methods.evaluate(*given, x, y, batch_size=7, callbacks=[look])
            methods.predict(*given, x, batch_size=7, verbose=0, callbacks=[look])
            methods.evaluate(*given, x, y, batch_size=7, verbose=2, steps=2, callbacks=[look])
    assert found[:3] == found[3:]


def orders(settings: dict[str, Any], fits: int) -> list[list[float]]:
    """The rows in the order that each of several fits takes them, an epoch each."""
    y, found = np.arange(9.0), []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: means.append(logs["loss"] * (batch + 1))
    )
    with Trainer({**settings, "checkpoint": {"resume": "never"}}) as trainer:
        for epoch in range(fits):
            means: list[float] = []
            given = {"initial_epoch": epoch, "epochs": epoch + 1, "batch_size": 1}
            trainer.fit(model, y[:, None], y, callbacks=[look], **given)
            found.append(np.round(np.diff(means, prepend=0)).tolist())
    return found


def test_each_fit_is_shuffled_differently_and_reproducibly(quiet: dict[str, Any]) -> None:
    found = orders(quiet, 3)
    assert [sorted(order) for order in found] == [list(range(9))] * 3
    assert len(set(map(tuple, found))) == 3
    assert orders(quiet, 2) == found[:2]
    first, second = orders({**quiet, "seed": 3}, 2)
    assert first == second  # as in Keras
