"""Metrics of all ranks equal those of one process on all of the data."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.callbacks import AverageMetrics, global_results
from ktrainer.distributed import SingleWorld
from ktrainer.errors import DivergenceError
from ktrainer.steps import named_variables
from ktrainer.steps.metric_states import adds_up, result_with, take_states

ROWS = 101  # odd: no two ranks have as many rows
EVEN = 100  # Keras itself weights the losses of single outputs by batch, not by example


class LastValue(keras.metrics.Metric):
    """Not a sum over examples: nothing says how parts make a whole."""

    def __init__(self, name: str = "last_value", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.mean(y_pred))

    def result(self) -> Any:
        return self.value  # the variable itself, as in Keras' own example of a metric


class Count(LastValue):
    """A sum over examples, and says so."""

    state_adds_up = True

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))


class FromParts(keras.metrics.Metric):
    """Made of metrics that add up, with a dict as its result."""

    def __init__(self, name: str = "from_parts") -> None:
        super().__init__(name=name)
        self.p, self.r = keras.metrics.Precision(), keras.metrics.Recall()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.p.update_state(y_true, y_pred)
        self.r.update_state(y_true, y_pred)

    def result(self) -> Any:
        return {"product": self.p.result() * self.r.result(), "p": self.p.result()}


class MaxInMean(keras.metrics.Mean):
    """A subclass of a known metric with a state of its own, which does not add up."""

    def __init__(self, name: str = "max_in_mean") -> None:
        super().__init__(name=name)
        self.highest = self.add_weight(name="highest", initializer="zeros")


class Squared(keras.metrics.Mean):
    """What it takes the mean of is its own, and how that is added up is Keras'."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(keras.ops.square(y_true - y_pred), sample_weight)

    def result(self) -> Any:
        return keras.ops.sqrt(super().result())


class AddedByHand(keras.metrics.Mean):
    """Adds to Keras' states itself."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(y_pred))
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], self.dtype))

    def reset_state(self) -> None:
        self.total.assign(0.0)
        self.count.assign(0.0)


class LargestInMean(keras.metrics.Mean):
    """Keras' states, set to what is no sum."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(keras.ops.maximum(self.total, keras.ops.max(y_pred)))
        self.count.assign(1.0)


class OfLargest(LargestInMean):
    """Assigns in the class that it derives from."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, 2 * y_pred)


class DeclaredLargest(LargestInMean):
    state_adds_up = True


class LargestAsPart(keras.metrics.Metric):
    def __init__(self, name: str = "as_part") -> None:
        super().__init__(name=name)
        self.part = LargestHere(name="part")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.part.update_state(y_true, y_pred)

    def result(self) -> Any:
        return self.part.result()


class LargestHere(keras.metrics.Mean):
    """Assigns in a function inside of its `update_state`."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        def keep(value: Any) -> None:
            self.total.assign(keras.ops.maximum(self.total, value))

        keep(keras.ops.max(y_pred))


def zoo() -> list[keras.metrics.Metric]:
    m = keras.metrics
    return [
        m.BinaryAccuracy(name="acc"),
        m.AUC(name="auc", num_thresholds=50),
        m.AUC(name="pr", curve="PR", multi_label=True, num_labels=4),
        m.Precision(thresholds=[0.3, 0.6], name="p"),
        m.Recall(name="r", class_id=1),
        m.TruePositives(name="tp"),
        m.SensitivityAtSpecificity(0.5, name="sas"),
        m.PrecisionAtRecall(0.5, name="par"),
        m.F1Score(average="macro", threshold=0.5, name="f1"),
        m.FBetaScore(average=None, beta=2.0, name="fbeta"),
        m.R2Score(name="r2"),
        m.BinaryIoU(name="iou"),
        m.OneHotMeanIoU(num_classes=4, name="miou"),
        m.RootMeanSquaredError(name="rmse"),
        m.CosineSimilarity(name="cos"),
        m.KLDivergence(name="kl"),
        m.MeanMetricWrapper(lambda t, p: keras.ops.mean((t - p) ** 2, -1), name="wrapped"),
        Count(name="count"),
        FromParts(),
        Squared(name="squared"),
        AddedByHand(name="by_hand"),
    ]


def predictions() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truths, probabilities on a grid of 1/16 (exact in float32 sums), and sample weights."""
    random = np.random.default_rng(0)
    truth = np.eye(4, dtype="float32")[random.integers(0, 4, ROWS)]
    probability = (random.integers(1, 16, (ROWS, 4)) / 16).astype("float32")
    return truth, probability, (random.integers(1, 4, ROWS) / 2).astype("float32")


def updated(rank: int, size: int) -> list[keras.metrics.Metric]:
    """The zoo after the rows of `rank`, in two batches."""
    truth, probability, weight = predictions()
    ends = {1: [ROWS], 2: [67, ROWS], 3: [20, 75, ROWS]}[size]
    start, end = ([0, *ends])[rank], ends[rank]
    metrics = zoo()
    middle = (start + end) // 2
    for part in (slice(start, middle), slice(middle, end)):
        for metric in metrics:
            if metric.name not in ("count", "from_parts", "miou", "f1", "iou"):
                metric.update_state(truth[part], probability[part], weight[part])
            else:
                metric.update_state(truth[part], probability[part])
    return metrics


def _zoo_on_ranks() -> tuple[dict[str, Any], bool]:
    here = distributed.current_world()
    metrics = updated(here.rank, here.size)
    before = [v.numpy().tobytes() for m in metrics for v in m.variables]
    calls: list[int] = []
    reduce = type(here).oob_allreduce
    counting = lambda self, value, *a: calls.append(np.size(value)) or reduce(self, value, *a)  # noqa: E731
    type(here).oob_allreduce = counting
    try:
        results = global_results(metrics, here)
    finally:
        type(here).oob_allreduce = reduce
    assert len(calls) == 2, "one comparison of names and one fused sum"
    assert calls[0] == 2
    unchanged = before == [v.numpy().tobytes() for m in metrics for v in m.variables]
    return results, unchanged


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [2, 3])
def test_zoo_equals_one_process(ranks, size: int) -> None:
    expected = global_results(updated(0, 1), SingleWorld())
    # Sums of many different fractions depend on their order in the last bits.
    rounded = {"cos", "kl", "r2"}
    for results, unchanged in ranks(size).run(_zoo_on_ranks):
        assert unchanged, "a rank's own states must stay its own"
        assert list(results) == list(expected)
        for name, value in expected.items():
            tolerance = 1e-6 if name in rounded else 0
            np.testing.assert_allclose(results[name], value, rtol=tolerance, err_msg=name)


def test_which_metrics_add_up() -> None:
    assert all(adds_up(metric) for metric in zoo())
    assert not adds_up(LastValue())
    assert not adds_up(MaxInMean())
    assert adds_up(LargestInMean())  # as far as is known: of this a warning tells


def _assigning_metrics() -> list[str]:
    """What is said of metrics whose states are summed over ranks, twice."""
    here = distributed.current_world()
    kinds = (LargestInMean, OfLargest, LargestAsPart, DeclaredLargest, AddedByHand, Squared)
    metrics = [kind(name=kind.__name__) for kind in kinds]
    for metric in metrics:
        metric.update_state(np.float32([1]), np.float32([here.rank]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            global_results(metrics, here)
    return [str(each.message) for each in caught]


def test_states_that_a_metric_assigns_itself_are_summed_over_ranks_with_a_warning(ranks) -> None:
    assert _assigning_metrics() == []  # one process sums nothing
    for messages in ranks(2).run(_assigning_metrics):
        names = [text.split(" assigns its states")[0] for text in messages]
        assert names == [f"the metric {name}" for name in ("LargestInMean", "OfLargest", "part")]
        assert all("state_adds_up" in text for text in messages)


class Listed(keras.metrics.Metric):
    """A mean of its own, of which Keras knows no variable."""

    def __init__(self, name: str = "listed") -> None:
        super().__init__(name=name)
        self.seen: list[float] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen += list(map(float, y_pred))

    def result(self) -> Any:
        return float(np.mean(self.seen))


def _listed() -> tuple[dict[str, Any], list[str]]:
    here = distributed.current_world()
    metrics = [keras.metrics.Mean(name="loss"), Listed()]
    metrics[0].update_state(here.rank, sample_weight=1 + here.rank)
    metrics[1].update_state(None, [10.0 * here.rank] * (1 + here.rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = global_results(metrics, here)
    return results, [str(each.message) for each in caught]


def test_a_metric_without_variables_is_averaged_over_ranks(ranks) -> None:
    assert not adds_up(Listed())
    for results, messages in ranks(2).run(_listed):
        assert results["listed"] == pytest.approx(2 / 3 * 10)
        (message,) = messages
        assert "listed" in message
        assert "state_adds_up" in message


def _unknown_metric() -> tuple[dict[str, Any], list[str]]:
    here = distributed.current_world()
    metrics = [keras.metrics.Mean(name="loss"), LastValue(name="unknown"), FromParts()]
    examples = [30, 10, 0][here.rank]
    if examples:
        metrics[0].update_state(here.rank + 1.0, sample_weight=examples)
        metrics[1].update_state(None, np.float32([here.rank + 1]))
    else:
        metrics[1].value.assign(float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [global_results(metrics, here) for _ in range(2)]
    assert results[0] == results[1]
    return results[0], [str(w.message) for w in caught]


@pytest.mark.exhaustive
def test_others_are_averaged_by_examples_with_a_warning(ranks) -> None:
    for results, messages in ranks(3).run(_unknown_metric):
        assert results["loss"] == results["unknown"] == (30 * 1 + 10 * 2) / 40
        assert len(messages) == 1
        assert "unknown" in messages[0]
        assert "state_adds_up" in messages[0]


def _different_keys() -> None:
    here = distributed.current_world()
    logs = {"loss": 1.0, **({"only_here": 2.0} if here.rank == 1 else {})}
    global_results([keras.metrics.Mean(name="loss")], here, logs=logs)


def test_different_log_keys_raise_instead_of_hanging(ranks) -> None:
    for outcome in ranks(2).outcomes(_different_keys):
        assert isinstance(outcome.error, DivergenceError)
        assert "rank 1 has log 'only_here'" in str(outcome.error)


def _custom_logs() -> dict[str, Any]:
    here = distributed.current_world()
    metric = keras.metrics.Mean(name="loss")
    metric.update_state(here.rank + 1.0, sample_weight=10 * (here.rank + 1))
    logs = {"loss": 5.0, "from_train_step": float(here.rank), "another": np.float32(2)}
    return global_results([metric], here, logs=logs)


def test_logs_of_a_users_own_train_step(ranks) -> None:
    for results in ranks(2).run(_custom_logs):
        assert list(results) == ["loss", "from_train_step", "another"]
        assert results["loss"] == pytest.approx((10 + 2 * 20) / 30)
        assert results["from_train_step"] == pytest.approx(20 / 30)
        assert results["another"] == 2
    metric = keras.metrics.Mean(name="loss")
    logs = {"loss": 5.0, "mine": 1.0}
    assert global_results([metric], SingleWorld(), logs=logs) == logs


def test_logs_of_a_step_in_one_process_are_its_own() -> None:
    metric = keras.metrics.Mean(name="loss")  # its states would say 0
    logs = {"loss": tf.constant(0.5), "inner": {"rows": np.int64(4)}, "text": "no number"}
    results = global_results([metric], SingleWorld(), logs=logs, of_step=True)
    assert results == {"loss": 0.5, "rows": 4}


def test_states_are_read_together_where_a_trace_has_made_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_variables, "view_of", None)  # which reads one alone
    metrics = [keras.metrics.Mean()]

    @tf.function
    def update(value: tf.Tensor) -> None:
        if len(metrics) == 1:  # as Keras makes those of compiled metrics
            metrics.append(keras.metrics.Mean())
        metrics[1].update_state(value)

    metrics[0].update_state(3.0)
    update(tf.constant(5.0))
    kinds = {type(variable.value) for metric in metrics for variable in metric.variables}
    assert len(kinds) == 2
    assert take_states(metrics) == [[3.0, 1.0], [5.0, 1.0]]


def _model_and_rows() -> tuple[Any, list[np.ndarray]]:
    truth = predictions()[0][:EVEN]
    x = np.random.default_rng(1).normal(size=(EVEN, 4)).astype("float32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    outputs = {
        "a": keras.layers.Dense(4, activation="sigmoid", name="a")(inputs),
        "b": keras.layers.Dense(4, activation="sigmoid", name="b")(inputs),
    }
    model = keras.Model(inputs, outputs)
    m = keras.metrics
    model.compile(
        keras.optimizers.SGD(0.0),  # the same weights everywhere, so that metrics must agree
        loss={"a": "binary_crossentropy", "b": "mse"},
        metrics={"a": [m.AUC(name="auc"), "accuracy"], "b": [m.Precision(name="auc")]},
        weighted_metrics={"a": [m.AUC(name="auc")]},
        run_eagerly=True,
    )
    return model, [x, truth]


def _fit_alone() -> tuple[dict[str, Any], dict[str, Any]]:
    here = distributed.current_world()
    model, arrays = _model_and_rows()
    mine = [a[here.rank :: here.size] for a in arrays]
    x, truth = mine
    callback = AverageMetrics()
    history = model.fit(
        x,
        {"a": truth, "b": truth},
        validation_data=(x[::2], {"a": truth[::2], "b": truth[::2]}),
        batch_size=len(x),
        epochs=2,
        verbose=0,
        callbacks=[callback],
    )
    return history.history, callback.results


def test_alone_under_keras(ranks) -> None:
    model, (x, truth) = _model_and_rows()
    rows = [np.arange(EVEN)[rank::2] for rank in range(2)]
    validation = np.concatenate([r[::2] for r in rows])
    expected = model.evaluate(
        x, {"a": truth, "b": truth}, batch_size=EVEN, verbose=0, return_dict=True
    )
    v = {"a": truth[validation], "b": truth[validation]}
    expected_val = model.evaluate(x[validation], v, batch_size=EVEN, verbose=0, return_dict=True)
    assert "a_weighted_auc" in expected
    for history, results in ranks(2).run(_fit_alone):
        assert set(history) == {*expected, *(f"val_{k}" for k in expected)}
        for name, value in expected.items():
            np.testing.assert_allclose(history[name], [value] * 2, rtol=1e-6, err_msg=name)
        for name, value in expected_val.items():
            np.testing.assert_allclose(history[f"val_{name}"], [value] * 2, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(results[name], value, rtol=1e-6)


def test_one_process_changes_nothing() -> None:
    histories = []
    for callbacks in ([], [AverageMetrics()]):
        model, (x, truth) = _model_and_rows()
        y = {"a": truth, "b": truth}
        fitted = model.fit(x, y, validation_data=(x, y), epochs=2, verbose=0, callbacks=callbacks)
        histories.append(fitted.history)
    assert histories[0] == histories[1]


class OwnOrder(keras.metrics.Mean):
    """A mean whose variables are made by itself, `count` first."""

    def __init__(self) -> None:
        keras.metrics.Metric.__init__(self, name="own_order")
        self.count = self.add_variable((), "zeros", name="count")
        self.total = self.add_variable((), "zeros", name="total")


class Vector(keras.metrics.Mean):
    """Means of two numbers."""

    def __init__(self) -> None:
        keras.metrics.Metric.__init__(self, name="vector")
        self.total = self.add_variable((2,), "zeros", name="total")
        self.count = self.add_variable((2,), "zeros", name="count")


def with_own_result() -> keras.metrics.Mean:
    metric = keras.metrics.Mean()
    metric.result = lambda: 2 * metric.total
    return metric


def assert_same_result(metric: Any, *states: Any) -> None:
    """`result_with` has the bits of Keras, and leaves the metric's states as they are."""
    of_metric = [np.array(x, v.dtype) for x, v in zip(states, metric.variables, strict=True)]
    before = take_states([metric])[0]
    ours = result_with(metric, of_metric)
    assert [x.tobytes() for x in take_states([metric])[0]] == [x.tobytes() for x in before]
    for variable, state in zip(metric.variables, of_metric, strict=True):
        variable.assign(state)
    assert ours.tobytes() == np.array(metric.result()).tobytes()


@pytest.mark.parametrize("count", [0.0, 3.0, 1e7])
def test_a_mean_has_the_bits_of_keras(count: float) -> None:
    metric = keras.metrics.SparseCategoricalAccuracy()
    metric.update_state([[1], [0]], [[0.2, 0.8], [0.1, 0.9]])
    for total in np.random.default_rng(0).normal(size=200):
        assert_same_result(metric, total, count)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_means_of_numbers_that_are_not_usual(dtype: str) -> None:
    """TensorFlow makes 0 of numbers that are too small, and warns of none that are too large."""
    sizes = np.finfo(dtype)
    totals = [0.0, -0.0, 1.0, np.nan, np.inf, sizes.max, sizes.tiny, sizes.tiny / 4]
    for total in totals:
        for count in (*totals, 3.0, 0.01, -2.0):
            assert_same_result(keras.metrics.Mean(dtype=dtype), total, count)


@pytest.mark.parametrize(
    ("make", "states"),
    [(OwnOrder, (2.0, 6.0)), (Vector, ([1, 2], [2, 0])), (with_own_result, (2.0, 6.0))],
)
def test_means_of_a_kind_of_their_own(make: Any, states: Any) -> None:
    assert_same_result(make(), *states)
