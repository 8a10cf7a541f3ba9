"""`health.verify`: it speaks of losses that cannot be split, and is silent otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.verify import first_update_check
from tests.contracts import running
from tests.contracts.test_backends import REFUSED
from tests.contracts.zoo import ZOO
from tests.contracts.zoo_parts import floats
from tests.tf_distribute.running import ONE_PROCESS, make_devices
from tests.verify import models, stateful_trainings

Ranks = Callable[..., Any]


def assert_speaks(found: dict[str, list[str]], parts: int) -> None:
    for name, texts in found.items():
        assert len(texts) == 1, (name, texts)
        (text,) = texts
        assert "dense" in text  # the variable
        assert "trainer.loss_scope=global" in text
        assert "ktrainer verify" in text
        if name.startswith("sum"):
            assert f"smaller by the number of parts ({parts})" in text
            assert "sum over examples" in text
        else:
            assert "couples examples" in text


def test_planted_mistakes_are_found_on_two_ranks(ranks: Ranks) -> None:
    names, settings = [*models.PLANTED], {"name": "data_parallel"}
    found = ranks(2).run(models.said, names, "float64", **settings, deadline=120)
    assert_speaks(found[0], 2)
    assert not any(found[1].values())  # once, by the first rank


def test_what_is_global_is_not_compared(ranks: Ranks) -> None:
    arguments = ["contrastive"], "float64", "global"
    found = ranks(2).run(models.said, *arguments, name="data_parallel", deadline=120)
    assert not any(each["contrastive"] for each in found)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_call_that_couples_examples_is_named_whatever_the_scope(ranks: Ranks, scope: str) -> None:
    arguments = ["coupled_call"], "float64", scope
    found = ranks(2).run(models.said, *arguments, name="data_parallel", deadline=120)
    (text,) = found[0]["coupled_call"]
    assert "depends on the others in the batch" in text
    assert "loss_scope" not in text


class Counted(keras.Model):
    """Its outputs depend on how often it was called."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.calls.assign_add(1.0)
        return super().call(x, training=training) * self.calls


class FromPython(keras.Model):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x, training=training) + np.random.default_rng().normal()


class WithMean(keras.Model):
    """Its second output is not of examples."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = super().call(x, training=training)
        return y, keras.ops.mean(y)


@pytest.mark.parametrize(
    ("kind", "couples"),
    [(models.CoupledCall, True), (Counted, False), (FromPython, False), (WithMean, False)],
)
def test_only_outputs_of_an_example_that_depend_on_others_couple(kind: type, couples: bool) -> None:
    model, draws = models.net(kind), first_update_check.RandomDraws()
    batch = tf.constant(floats(10, 8)), tf.constant(floats(10, 5))
    with first_update_check.eager_passes(draws):
        passes = first_update_check.GradientPasses(model, True, draws)
        assert first_update_check.call_couples_examples(passes, batch, 10, 4) is couples


def under_mirrored(function: Callable[..., Any], *args: Any) -> Any:
    make_devices()
    return function(*args, name="tf_distribute", strategy="mirrored", devices=2)


@pytest.mark.exhaustive
def test_planted_mistakes_are_found_on_two_mirrored_devices(ranks: Ranks) -> None:
    run = ranks(1, ONE_PROCESS).run
    assert_speaks(run(under_mirrored, models.said, [*models.PLANTED], "float32")[0], 2)


def test_planted_mistakes_are_found_in_a_pipeline(ranks: Ranks) -> None:
    settings = {"name": "pipeline", "partitions": 2, "microbatches": 4}
    names = ["sum_loss", "contrastive"]
    found = ranks(2).run(models.said, names, "float32", **settings, deadline=120)
    assert_speaks(found[0], 4)
    assert not any(found[1].values())


def test_a_coupled_call_is_found_in_a_pipeline_that_builds_the_model(ranks: Ranks) -> None:
    settings = {"name": "pipeline", "partitions": 2, "microbatches": 4}
    found = ranks(2).run(models.said, ["unbuilt"], "float64", **settings, deadline=120)
    (text,) = found[0]["unbuilt"]
    assert "'tensordot' (" in text
    assert "models.py:" in text
    assert "4 microbatches" in text
    assert not found[1]["unbuilt"]


MIRRORED = [*ZOO][::3]


@pytest.mark.exhaustive
def test_sound_models_on_two_ranks(ranks: Ranks) -> None:
    """The others, and in stages: `contracts/test_backends.py`."""
    found = ranks(2).run(models.quiet, models.MOVING, name="data_parallel", deadline=250)
    assert not any(said for rank in found for said in rank.values()), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [MIRRORED[::2], MIRRORED[1::2]])
def test_sound_models_on_two_mirrored_devices(ranks: Ranks, names: list[str]) -> None:
    (found,) = ranks(1, ONE_PROCESS).run(under_mirrored, models.quiet, names, deadline=250)
    assert not any(found.values()), found


@pytest.mark.exhaustive
def test_sound_models_in_a_pipeline(ranks: Ranks) -> None:
    settings = {"name": "pipeline", "partitions": 2, "microbatches": 2}
    names = [name for name in models.MOVING if name not in REFUSED]
    found = ranks(2).run(models.quiet, names, **settings, deadline=250)
    assert not any(said for rank in found for said in rank.values()), found


@pytest.fixture
def unhurried() -> Iterator[None]:
    with running.unhurried():
        yield


@pytest.fixture
def skipped(unhurried: None, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Trains with two batches an update; what it says of the check, which must not warn."""

    def train(model: keras.Model, data: Any, **settings: Any) -> str:
        given = models.config(name="local")
        given["trainer"] |= {"accumulate": 2}
        given["logging"] |= {"progress": "plain"}
        given |= settings
        with Trainer(given) as trainer:
            trainer.fit(model, data)
        lines = capfd.readouterr().err.splitlines()
        return "\n".join(line for line in lines if "health.verify" in line)

    return train


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision(skipped: Callable[..., str], policy: str) -> None:
    assert skipped(*models.mixed(policy)) == ""


def test_nothing_is_left_behind(skipped: Callable[..., str]) -> None:
    x, y = floats(2 * models.ROWS, 8), floats(2 * models.ROWS, 5, seed=1)
    counts = []
    for verify in ("off", "auto"):
        model = models.net(models.Counting)
        model.compile("sgd")
        assert skipped(model, (x, y), health={"verify": verify}) == ""
        counts.append((float(model.raw), float(model.count), model.calls))
    assert counts[0] == counts[1]
    random = np.random.get_state()[1].copy()
    states = [np.array(v) for v in model.variables]
    passes = first_update_check.GradientPasses(model, True, first_update_check.RandomDraws())
    calls = model.calls
    with first_update_check.eager_passes(first_update_check.RandomDraws()):
        found = passes.whole((tf.constant(x[:4]), tf.constant(y[:4])))
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
    assert tf.config.experimental.tensor_float_32_execution_enabled()
    raw, count = found.changed
    assert (raw, count.split(".")[-1]) == ("a tf.Variable of shape ()", "calls")
    assert model.calls == calls
    assert float(model.raw) == counts[0][0]
    for before, variable in zip(states, model.variables, strict=True):
        np.testing.assert_array_equal(before, variable.numpy())
    np.testing.assert_array_equal(random, np.random.get_state()[1])
    assert not tf.config.functions_run_eagerly()


def test_metrics_are_no_side_effect(unhurried: None) -> None:
    model = models.net()
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = tf.constant(floats(8, 8)), tf.constant(floats(8, 5, seed=1))
    passes = first_update_check.GradientPasses(model, True, first_update_check.RandomDraws())
    with first_update_check.eager_passes(first_update_check.RandomDraws()):
        assert passes.whole((x, y)).changed == []


def test_users_functions_are_not_traced_meanwhile(skipped: Callable[..., str]) -> None:
    """A `tf.function` would keep what it was traced with: batch-invariant random numbers."""

    class Noisy(keras.layers.Layer):
        @tf.function
        def call(self, x: Any) -> Any:
            return x + tf.random.normal(tf.shape(x)[:1])[:, None]

    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(5)(Noisy()(inputs)))
    model.compile("sgd", "mse")
    assert skipped(model, (floats(models.ROWS, 8), floats(models.ROWS, 5))) == ""
    layer = next(layer for layer in model.layers if isinstance(layer, Noisy))
    drawn = layer(tf.zeros([64, 1])).numpy()
    assert len(np.unique(drawn)) == 64


def test_sums_that_are_counted_whole(skipped: Callable[..., str]) -> None:
    model = models.net(models.Vector)
    model.compile("sgd")
    assert skipped(model, (floats(models.ROWS, 8), floats(models.ROWS, 5))) == ""


def test_what_is_gathered_is_not_compared(skipped: Callable[..., str]) -> None:
    data = floats(models.ROWS, 8), floats(models.ROWS, 5)
    model = models.net(models.Gathering)
    model.compile("sgd")
    assert "ktrainer.all_gather" in skipped(model, data)


class FromNumpy(keras.Model):
    seen = 0

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        FromNumpy.seen += 1
        return (1 + FromNumpy.seen) * keras.ops.mean(y_pred)


def test_what_cannot_be_compared_says_so(skipped: Callable[..., str]) -> None:
    data = floats(models.ROWS, 8), floats(models.ROWS, 5)
    model = models.net(FromNumpy)
    model.compile("sgd")
    said = skipped(model, data)
    assert "two passes over the same examples differ" in said
    assert "ktrainer verify" in said


class Failing(keras.Model):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError("cannot run eagerly")
        return keras.ops.mean(y_pred)


def test_an_error_within_is_none_of_the_run(skipped: Callable[..., str]) -> None:
    model = models.net(Failing)
    model.compile("sgd")
    said = skipped(model, (floats(models.ROWS, 8), floats(models.ROWS, 5)))
    assert "RuntimeError: cannot run eagerly" in said


def test_what_takes_too_long_is_skipped(
    skipped: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = models.make_planted("sum_loss")
    monkeypatch.setattr(first_update_check, "SECONDS", 1e-6)
    assert "would take too long" in skipped(model, data)


def test_outputs_that_are_drawn_do_not_couple_examples(unhurried: None) -> None:
    given = models.config(name="local")
    given["trainer"] |= {"accumulate": 2}
    with Trainer(given) as trainer, pytest.warns(UserWarning, match="The loss couples examples"):
        trainer.fit(*models.sampling())


@pytest.mark.exhaustive
def test_off_and_one_part_and_a_second_fit(unhurried: None) -> None:
    model, data = models.make_planted("contrastive")
    config = models.config(name="local")
    with Trainer(config) as trainer:
        trainer.fit(model, data)
    config["trainer"] |= {"accumulate": 2}
    with Trainer({**config, "health": {"verify": "off"}}) as trainer:
        trainer.fit(model, data)
    with Trainer(config) as trainer:
        with pytest.warns(UserWarning, match="couples examples"):
            trainer.fit(model, data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit(model, data)  # said once
        model.compile("sgd")
        with pytest.warns(UserWarning, match="couples examples"):
            trainer.fit(model, data)


class TruePositives(keras.metrics.Metric):
    """Keras' guide has this one: targets of shape (batch,) broadcast against (batch, 1)."""

    def __init__(self) -> None:
        super().__init__(name="true_positives")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        best = keras.ops.reshape(keras.ops.argmax(y_pred, axis=1), (-1, 1))
        equal = keras.ops.cast(y_true, "int32") == keras.ops.cast(best, "int32")
        self.total.assign_add(keras.ops.sum(keras.ops.cast(equal, "float32")))

    def result(self) -> Any:
        return self.total


def classifier(*metrics: Any) -> tuple[keras.Model, Any]:
    model = models.net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=list(metrics))
    return model, (floats(models.ROWS, 8), np.arange(models.ROWS) % 5)


def test_a_metric_that_couples_examples(unhurried: None) -> None:
    given = models.config(name="local")
    given["trainer"] |= {"accumulate": 2}
    model, data = classifier("accuracy", TruePositives())
    with Trainer(given) as trainer:
        words = "the metric true_positives will not be as in one process: for 12 examples"
        with pytest.warns(UserWarning, match=words):
            trainer.fit(model, data)


@pytest.mark.exhaustive
def test_sound_metrics(skipped: Callable[..., str]) -> None:
    def mean_margin(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.max(y_pred, -1) - keras.ops.min(y_pred, -1))

    metrics = ["accuracy", mean_margin, keras.metrics.SparseTopKCategoricalAccuracy(2)]
    assert skipped(*classifier(*metrics)) == ""
    model = models.net()
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.R2Score()], weighted_metrics=["mse"])
    y = np.tile(floats(models.ROWS, 1, seed=1), (1, 5))
    data = floats(models.ROWS, 8), y, floats(models.ROWS, seed=2) ** 2
    assert skipped(model, data) == ""
    model = models.net()
    auc = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.MeanIoU(2)]
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), metrics=auc)
    assert skipped(model, (floats(models.ROWS, 8), np.eye(5)[np.arange(models.ROWS) % 5])) == ""


def test_what_changes_a_list_is_not_compared(skipped: Callable[..., str]) -> None:
    model = models.net(stateful_trainings.Keeping)
    model.compile("sgd")
    said = skipped(model, (floats(models.ROWS, 8), floats(models.ROWS, 5)))
    assert "its step changes keeping.state" in said


def test_python_in_a_pipeline_of_tensorflow_is_not_disturbed(skipped: Callable[..., str]) -> None:
    data = tf.data.Dataset.from_generator(
        lambda: iter([(floats(models.ROWS, 8), floats(models.ROWS, 5))]),
        output_signature=(tf.TensorSpec([None, 8]), tf.TensorSpec([None, 5])),
    )
    model = models.net()
    model.compile("sgd", "mse")
    assert "calls Python" in skipped(model, data)


class Placed(keras.Model):
    """Tokens with a table of positions, looked up once a batch or for each example."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each = each
        self.tokens = keras.layers.Embedding(9, 4)
        self.places = keras.layers.Embedding(5, 4)
        self.dropout = keras.layers.Dropout(0.1)  # assigns to its seeds
        self.head = keras.layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        positions = keras.ops.arange(5)
        if self.each:
            positions = keras.ops.broadcast_to(positions, keras.ops.shape(x))
        sums = self.dropout(self.tokens(x) + self.places(positions))
        return self.head(keras.ops.mean(sums, axis=1))


@pytest.mark.quick("True-adam-True-False")
@pytest.mark.parametrize(
    ("each", "optimizer", "eagerly", "warned"),
    [
        (False, "adam", True, True),
        (False, "adam", False, False),
        (False, "sgd", True, False),
        (True, "adam", True, False),
    ],
)
def test_a_table_that_is_looked_up_once_a_batch(
    each: bool, optimizer: str, eagerly: bool, warned: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Placed(each)
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=eagerly)
    x, y = np.arange(80).reshape(16, 5) % 9, np.arange(16) % 3
    settings = {"trainer": {"accumulate": 2}, "data": {"batch_size": 8}}
    with running.unhurried(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Trainer({**settings, "logging": {"progress": "plain", "csv": False}}) as trainer:
            trainer.fit(model, x, y)
    found = [str(w.message) for w in caught if "looked up once a batch" in str(w.message)]
    assert len(found) == warned
    assert "did not check" not in capfd.readouterr().err
    assert all("look rows up for every example" in text for text in found)


def test_few_rows_of_sparse_and_dense_arrays_are_as_many() -> None:
    dense = np.eye(32, dtype="float32")
    (sparse, y), rows = first_update_check._few_rows((tf.sparse.from_dense(dense), dense))
    assert rows < 32
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), dense[:rows])
    np.testing.assert_array_equal(y, dense[:rows])
