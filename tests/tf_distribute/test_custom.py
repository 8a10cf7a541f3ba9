"""Steps of the user's own: `train_step`, and loops with `scope`, `distribute`, `run`, `reduce`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import use_float64, with_ktrainer
from tests.contracts.zoo import ZOO
from tests.dist.small import more
from tests.tf_distribute.running import close, make_devices, under
from tests.tf_distribute.test_features import trainer, vectors

WORKERS = "multi_worker_mirrored"
ROWS, BATCH = 33, 16  # the last batch has one row: one replica has none


def trained(strategy: str) -> Any:
    """Sums of losses, means of rows, and weights; losses are divided by the global batch."""
    import keras
    import tensorflow as tf

    x, y = vectors(ROWS)
    with trainer(strategy) as it:
        with it.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss, "rows": tf.cast(tf.shape(x)[0], tf.float32)}

        found = []
        for batch in it.distribute(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)):
            of_replicas = it.run(step, *batch)
            mean = it.reduce("mean", of_replicas)
            found.append([float(it.reduce("sum", of_replicas["loss"])), float(mean["rows"])])
        return found, [np.array(v.numpy()) for v in model.trainable_variables]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_a_loop_with_batches_that_do_not_divide(ranks: Callable[..., Any], strategy: str) -> None:
    by_rank = under(ranks, strategy, trained, strategy)
    ((expected, weights),) = under(ranks, "local", trained, "local")
    assert [rows for _, rows in expected] == [16, 16, 1]
    for ours in by_rank:
        for (loss, rows), (reference, whole) in zip(ours[0], expected, strict=True):
            assert loss == pytest.approx(reference, rel=1e-5)
            assert rows == whole / 2
        close(ours[1], weights, atol=1e-6)


def rows_seen(policy: str, folder: str) -> list[list[int]]:
    """The numbers of the rows that this process gets, step by step."""
    import tensorflow as tf

    words = {"backend__auto_shard": policy}
    words |= {"data__batch": "per_worker"} if policy == "off" else {}
    with trainer("multi_worker_mirrored", **words) as it:
        files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
        lines = tf.data.TextLineDataset(files).map(lambda s: tf.strings.to_number(s, tf.int64))
        parts = map(it.strategy.experimental_local_results, it.distribute(lines.batch(4)))
        return [part.numpy().tolist() for (part,) in parts]


@pytest.mark.exhaustive
def test_how_processes_share_the_data(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Two files, of rows 0 to 7 and 8 to 15; both processes together take 4 a step."""
    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("\n".join(str(8 * file + i) for i in range(8)))
    found = {
        policy: under(ranks, "multi_worker_mirrored", rows_seen, policy, str(tmp_path))
        for policy in ("data", "file", "off")
    }
    pairs = np.arange(16).reshape(8, 2).tolist()
    assert found == {
        "data": [pairs[0::2], pairs[1::2]],
        "file": [pairs[:4], pairs[4:]],
        "off": [pairs, pairs],
    }


def assigning_step(
    strategy: str,
    devices: int | None = None,
    resets: int = 2,
    reads: bool = True,
    eager: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """What a `train_step` gives that assigns its learning rate, resets metrics, trains on what
    another one has counted, and counts rows.

    Args:
        resets: how many metrics; the second one must see the outputs of all replicas.
        reads: train on what a metric has counted, which a process knows of its own rows.
        eager: run the step eagerly.
    """
    import keras
    import tensorflow as tf

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros")

        def update_state(self, y: Any) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y)))

        def result(self) -> Any:
            return self.value

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            words = {"trainable": False, "aggregation": "sum", "initializer": "zeros"}
            self.seen = [self.add_weight((), dtype=t, **words) for t in ("float32", "int32")]
            self.last = self.add_weight((), **words)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                for seen in self.seen:
                    seen.assign_add(tf.cast(tf.shape(x)[0], seen.dtype))
                self.last.assign(0.0)
                self.last.assign_add(tf.reduce_sum(x))
            return x

    class Assigning(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.counting, self.dense = Counting(), keras.layers.Dense(3)
            self.of_batch = [keras.metrics.Sum(name="of_batch"), Largest()][:resets]
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(self.counting(x, training=training))

        def train_step(self, data: Any) -> Any:
            updates = tf.cast(self.optimizer.iterations, self.dtype)
            self.optimizer.learning_rate.assign(0.5 / (1 + updates))
            x, y = data
            if reads:
                x = x + self.seen.result()
                self.seen.update_state(x[:, 1])
            logs = super().train_step((x, y))
            for metric in self.of_batch:
                metric.reset_state()
                metric.update_state(data[0][:, 0])
                logs[metric.name] = metric.result()
            whole = tf.reduce_sum(data[1])
            return {**logs, "whole": whole, "float": tf.cast(whole, self.dtype)}

    use_float64()
    keras.utils.set_random_seed(0)
    with trainer(strategy, devices, data__batch_size=16, trainer__epochs=2, **more) as it:
        model = Assigning()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss, run_eagerly=eager)
        history = it.fit(model, vectors(33)).history
        values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    return {"history": history, "values": values}


XLA = {"trainer__xla": "true"}


@pytest.mark.quick("mirrored-2-settings0")
@pytest.mark.parametrize(
    ("strategy", "devices", "settings"),
    [
        ("mirrored", 2, {}),
        more("mirrored", 2, {**XLA, "resets": 1}),
        more("mirrored", 2, {"trainer__accumulate": 2}),
        ("one_device", None, {}),
        ("mirrored", 2, {"eager": True}),
        more(WORKERS, 1, {**XLA, "resets": 1, "reads": False}),
        ("data_parallel", None, {"resets": 0, "reads": False}),
        more("data_parallel", None, {**XLA, "resets": 0, "reads": False}),
        more("data_parallel", None, {"trainer__accumulate": 2, "resets": 0, "reads": False}),
    ],
)
def test_what_a_step_assigns(
    ranks: Callable[..., Any], strategy: str, devices: int | None, settings: dict[str, Any]
) -> None:
    alone = {key: value for key, value in settings.items() if key != "trainer__xla"}
    (truth,) = under(ranks, "local", assigning_step, "local", **alone)
    for ours in under(ranks, strategy, assigning_step, strategy, devices, **settings):
        assert ours["history"]["whole"] == pytest.approx(ours["history"]["float"])
        for key in truth["history"].keys() - {"whole", "float"}:
            mine, values = ours["history"][key], truth["history"][key]
            np.testing.assert_allclose(mine, values, rtol=1e-9, err_msg=key)
        for mine, value in zip(ours["values"], truth["values"], strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-9, atol=1e-11)


def metrics_apart(strategy: str) -> list[str]:
    """What is said of metrics that a step trains on, and of one of a model inside."""
    import warnings

    import keras
    import tensorflow as tf

    class Inner(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="inner")
            self.dense, self.rows = keras.layers.Dense(1), keras.metrics.Sum(name="rows")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.seen, self.now = (keras.metrics.Mean(name=name) for name in ("seen", "now"))

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> Any:
            x = data[0]
            before = self.seen.result()
            self.now.update_state(x)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - before - self.now.result()) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.seen.update_state(x)
            self.inner.rows.update_state(tf.ones_like(x[:, 0]))
            return {"rows": self.inner.rows.result(), "seen": self.seen.result()}

    devices = 2 if strategy == "mirrored" else None
    quiet = trainer(strategy, devices, health__verify="off")
    with quiet as it, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = Outer()
        model.compile("sgd")
        it.fit(model, vectors(33))
    texts = [str(each.message) for each in said]
    return [text for text in texts if "gradients of Outer" in text or "a step counts" in text]


@pytest.mark.parametrize("strategy", ["mirrored", "one_device", "data_parallel"])
def test_metrics_that_do_not_count_all_rows_are_named(
    ranks: Callable[..., Any], strategy: str
) -> None:
    """In one process a metric has counted all rows before the step, and not in it."""
    names = {"mirrored": ["now"], "one_device": [], "data_parallel": ["now", "seen"]}[strategy]
    for texts in under(ranks, strategy, metrics_apart, strategy):
        found = {
            name for name in ("now", "seen") for text in texts if f"metric {name!r}, wh" in text
        }
        assert found == {*names}
        unlisted = [text for text in texts if "the metric 'rows' of inner, which the" in text]
        assert bool(unlisted) == bool(names)


def averaging_step(
    strategy: str, devices: int | None = None, divides: bool = False, **more: Any
) -> tuple[list[np.ndarray], dict[str, list[float]], list[str]]:
    """Weights, logs and warnings of a model with TensorFlow's averages in its steps.

    Args:
        divides: divide the loss by the number of replicas, too.
    """
    import warnings

    import keras
    import tensorflow as tf

    class Averaging(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                losses = loss_of(y, self(x, training=True))
                loss = average(losses, sample_weight=tf.abs(x[:, 0]))
                loss += tf.nn.scale_regularization_loss(self.losses)
                if divides:
                    loss /= tf.distribute.get_strategy().num_replicas_in_sync
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"total": loss}

        def test_step(self, data: Any) -> Any:
            count = tf.distribute.get_strategy().num_replicas_in_sync  # of this nothing is said
            loss = tf.nn.compute_average_loss(loss_of(data[1], self(data[0])))
            return {"total": loss * count / count}

    average = tf.nn.compute_average_loss  # taken before, as `from ... import` does
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    keras.utils.set_random_seed(0)
    words = {"data__batch_size": 16, "trainer__epochs": 2, **more}
    with trainer(strategy, devices, **words) as it, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.05))
        model = Averaging([keras.Input((8,)), layer])
        model.compile(keras.optimizers.SGD(0.1))
        history = it.fit(model, vectors(33), validation_data=vectors(17)).history
        weights = [v.numpy() for v in model.weights]
    return weights, history, [str(each.message) for each in said]


@pytest.mark.quick("mirrored-2-settings0")
@pytest.mark.parametrize(
    ("strategy", "devices", "settings"),
    [
        ("mirrored", 2, {}),
        ("mirrored", 2, XLA),
        ("mirrored", 2, {"trainer__accumulate": 2}),
        (WORKERS, 1, {}),
        ("data_parallel", None, {}),
    ],
)
def test_averages_of_tensorflow_in_steps_of_fit(
    ranks: Callable[..., Any], strategy: str, devices: int | None, settings: dict[str, Any]
) -> None:
    alone = {key: value for key, value in settings.items() if key != "trainer__xla"}
    ((weights, history, _),) = under(ranks, "local", averaging_step, "local", **alone)
    for ours in under(ranks, strategy, averaging_step, strategy, devices, **settings):
        close(ours[0], weights, 1e-5)
        for key, values in history.items():
            np.testing.assert_allclose(ours[1][key], values, rtol=1e-5, err_msg=key)
        assert ours[2] == []


def test_a_step_of_fit_that_divides_by_the_number_of_replicas(ranks: Callable[..., Any]) -> None:
    """Two replicas are told of it; one, or each of several processes, has 1."""
    ((_, _, said),) = under(ranks, "mirrored", averaging_step, "mirrored", 2, divides=True)
    assert said
    for text in said:
        assert "reads num_replicas_in_sync, which is 2" in text
        assert "If the loss is divided by that number, remove the division" in text
    for _, _, nothing in under(
        ranks, "data_parallel", averaging_step, "data_parallel", divides=True
    ):
        assert nothing == []


def integers_set(
    strategy: str, rows: int, gathers: bool = False, **more: Any
) -> tuple[list[int] | str, set[str]]:
    """Integers of a layer: rows, calls, rows of all, columns, a place in a queue, the last rows. Or
    the error; and the warnings.

    Args:
        gathers: count gathered rows.
    """
    import warnings

    import keras
    from keras import ops

    from ktrainer import all_gather
    from ktrainer.errors import DivergenceError

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            words = {"trainable": False, "initializer": "zeros", "dtype": "int32"}
            self.rows = self.add_weight((), name="rows", **words)
            self.calls = self.add_weight((), name="calls", **words)
            self.all_rows = self.add_weight((), name="all_rows", aggregation="sum", **words)
            self.columns = self.add_weight((), name="columns", **words)
            self.place = self.add_weight((), name="place", **words)
            self.last = self.add_weight((), name="last", **words)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.rows.assign_add(ops.shape(all_gather(x) if gathers else x)[0])
                self.calls.assign_add(1)
                self.all_rows.assign_add(ops.shape(x)[0])
                self.columns.assign(ops.shape(x)[1])
                self.place.assign((self.place + ops.shape(x)[0]) % 20)
                self.last.assign(ops.shape(x)[0])
            return x

    words = {"data__batch_size": 16, **more}
    with trainer(strategy, **words) as it, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counting = Counting(name="counting")
        model = keras.Sequential([keras.Input((8,)), counting, keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(3))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        found: Any
        try:
            it.fit(model, vectors(rows))
            found = [int(v.numpy()) for v in counting.variables]
        except DivergenceError as error:
            found = str(error)
    return found, {str(each.message) for each in caught}


@pytest.mark.quick("mirrored-settings0", "data_parallel-settings0")
@pytest.mark.parametrize("settings", [{}, XLA, {"trainer__accumulate": 2}])
@pytest.mark.parametrize("strategy", ["mirrored", "data_parallel"])
def test_an_integer_that_is_computed_from_rows_is_warned_of(
    ranks: Callable[..., Any], strategy: str, settings: dict[str, Any]
) -> None:
    for found, (said,) in under(ranks, strategy, integers_set, strategy, 32, **settings):
        assert found == [16, 2, 32, 8, 16, 8]
        assert "adds to the integer" in said
        assert "counting/rows what it computes from its rows" in said
        assert 'add_weight(..., trainable=False, aggregation="sum")' in said


def test_one_process_counts_rows_in_any_integer(ranks: Callable[..., Any]) -> None:
    assert under(ranks, "local", integers_set, "local", 33) == [([33, 3, 33, 8, 13, 1], set())]


def statistics_set(strategy: str, gathers: bool = False) -> set[str]:
    """What is said of statistics that are no means of rows, and of some that are."""
    import warnings

    import keras
    from keras import ops

    from ktrainer import all_gather

    class Observing(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            words = {"trainable": False, "initializer": "zeros"}
            names = ("largest", "rows", "mean", "calls", "moved", "weighted", "positive")
            self.of = {name: self.add_weight((), name=name, **words) for name in names}
            self.queue = self.add_weight((6, 8), name="queue", **words)
            self.means = self.add_weight((3,), name="means", **words)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                rows, of = all_gather(x) if gathers else x, self.of
                of["largest"].assign(ops.maximum(of["largest"], ops.max(rows)))
                of["rows"].assign_add(ops.cast(ops.shape(rows)[0], "float32"))
                self.queue.assign(ops.concatenate([rows[:1], self.queue], 0)[:6])
                mean = ops.mean(x)
                of["mean"].assign(0.9 * of["mean"] + 0.1 * mean)
                of["moved"].assign_add(0.1 * (mean - of["moved"]))
                of["calls"].assign_add(1.0)
                of["positive"].assign(ops.maximum(of["positive"] + mean, 0.0))
                self.means.assign(ops.concatenate([self.means[1:], ops.reshape(mean, (1,))]))
                of["weighted"].assign(ops.maximum(ops.max(of["calls"]), of["weighted"]))
            return x

    words = {"data__batch_size": 16, "health__verify": "off"}
    with trainer(strategy, **words) as it, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = keras.Sequential([keras.Input((8,)), Observing(name="of"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        it.fit(model, vectors(32))
    found = (re.search(r" sets \S*of/(\w+) to .* average it", str(e.message)) for e in caught)
    return {match[1] for match in found if match}


@pytest.mark.parametrize("strategy", ["mirrored", "data_parallel"])
def test_statistics_that_are_no_means_are_warned_of(
    ranks: Callable[..., Any], strategy: str
) -> None:
    for gathers in (False, True):
        for named in under(ranks, strategy, statistics_set, strategy, gathers=gathers):
            assert named == (set() if gathers else {"largest", "rows", "queue"})


@pytest.mark.parametrize("strategy", ["mirrored", "data_parallel"])
def test_an_integer_that_is_computed_from_gathered_rows(
    ranks: Callable[..., Any], strategy: str
) -> None:
    for result in under(ranks, strategy, integers_set, strategy, 32, gathers=True):
        assert result == ([32, 2, 32, 8, 16, 8], set())


def test_the_audit_says_how_to_make_an_integer(ranks: Callable[..., Any]) -> None:
    for found, _ in under(ranks, "data_parallel", integers_set, "data_parallel", 41):
        assert "counting/rows' is not the same on all ranks" in found
        assert found.endswith('make it with add_weight(..., trainable=False, aggregation="sum").')


def weights_assigned_in_steps() -> list[Any]:
    """A bias that steps of `fit`, then of a loop, set to the mean of their rows, as it ends up."""
    import keras
    import tensorflow as tf

    class Centred(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.layers[0].bias.assign(tf.reduce_mean(data[0], 0))
            return logs

    x, _ = vectors(48)
    with trainer(WORKERS, data__batch_size=16) as it:
        model = Centred([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match="the weight .*bias what it computes from its rows"):
            it.fit(model, (x, x))
        found = [model.layers[0].bias.numpy()]
        with it.scope():
            weight = keras.Variable(tf.zeros(8))
        for batch in it.distribute(tf.data.Dataset.from_tensor_slices(x).batch(16)):
            it.run(lambda x: weight.assign(tf.reduce_mean(x, 0)), batch)
        return [*found, weight.numpy()]


@pytest.mark.exhaustive
def test_weights_that_steps_assign_are_those_of_replica_0(ranks: Callable[..., Any]) -> None:
    truth = vectors(48)[0][32:40].mean(0)
    for ours in under(ranks, WORKERS, weights_assigned_in_steps):
        for value in ours:
            np.testing.assert_allclose(value, truth, rtol=1e-5, atol=1e-6)


def sharpened(strategy: str, **settings: Any) -> set[str]:
    """The weights that are named where a step moves them by its gradients, and back."""
    import warnings

    import keras
    import tensorflow as tf

    class Sharpened(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0]))
            moves = [0.05 * tf.math.l2_normalize(g) for g in tape.gradient(loss, weights)]
            for weight, move in zip(weights, moves, strict=True):
                weight.assign_add(move)
            logs = super().train_step(data)
            weights[0].assign(tf.clip_by_value(weights[0].value, -9.0, 9.0))  # no rows in this
            return logs

    words = {"data__batch_size": 8, "health__audit_every": "null", "health__verify": "off"}
    with trainer(strategy, **words, **settings) as it, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = Sharpened([keras.Input((8,)), keras.layers.Dense(8, use_bias=False, name="a")])
        model.compile("sgd", "mse")
        it.fit(model, (vectors(16)[0], vectors(16)[0]))
    return {
        str(e.message).split("weight ")[1].split()[0] for e in said if "to the weight" in str(e)
    }


def test_weights_that_steps_assign_from_rows_are_named(ranks: Callable[..., Any]) -> None:
    for strategy, settings, named in [
        ("data_parallel", {}, {"sharpened/a/kernel"}),
        ("local", {"trainer__accumulate": 2}, {"sharpened/a/kernel"}),
        ("local", {}, set()),
    ]:
        for found in under(ranks, strategy, sharpened, strategy, **settings):
            assert found == named


def skipped_gan(strategy: str, devices: int | None) -> str:
    """What is said of a step of two updates, one of which may be bad."""
    from ktrainer.errors import ModelError

    make_devices()
    backend: dict[str, Any] = {"name": "tf_distribute", "strategy": strategy, "devices": devices}
    with pytest.raises(ModelError) as caught:
        with_ktrainer(ZOO["gan"], backend=backend, health={"nan": "skip"})
    return str(caught.value)


@pytest.mark.parametrize(("strategy", "devices"), [("mirrored", 2), ("one_device", 1)])
def test_a_step_of_two_updates_is_not_half_skipped(
    ranks: Callable[..., Any], strategy: str, devices: int
) -> None:
    (said,) = under(ranks, strategy, skipped_gan, strategy, devices)
    assert "applies optimizers 2 times" in said
    assert "Set them to stop or rollback" in said


def raw_variable_assigned() -> list[str]:
    """What is said of a counter of TensorFlow's that a step of `fit`, then of a loop, adds to; a
    variable of the scope is then counted, and so is the first one where one replica runs."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import ModelError

    class Counting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            self.batches.assign_add(1.0)
            return super().train_step(data)

    said, counter = [], tf.Variable(0.0, name="batches", trainable=False)

    def fit(it: Any) -> None:
        model = Counting([keras.Input((8,)), keras.layers.Dense(8)])
        model.batches = counter
        model.compile("sgd", "mse")
        x, _ = vectors(48)
        it.fit(model, (x, x))

    def count() -> None:
        counter.assign_add(1.0)

    with trainer("mirrored", data__batch_size=16) as it:
        with it.scope():
            inside = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        def count_inside() -> None:
            inside.assign_add(tf.ones([]))

        for call, argument in ((fit, it), (it.run, count)):
            with pytest.raises(ModelError) as caught:
                call(argument)
            said.append(str(caught.value))
        it.run(count_inside)
        said.append(str(inside.numpy()))
    with trainer("one_device", None, data__batch_size=16) as it:
        counter.assign(0.0)
        fit(it)
    return [*said, str(counter.numpy())]


def test_a_variable_that_every_replica_would_assign_is_refused(ranks: Callable[..., Any]) -> None:
    ((*refused, inside, alone),) = under(ranks, "mirrored", raw_variable_assigned)
    for said in refused:
        assert "a step assigns to batches:0, a tf.Variable outside of the strategy" in said
        assert "add_weight(trainable=False)" in said
    assert (inside, alone) == ("2.0", "3.0")
