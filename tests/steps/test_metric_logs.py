"""Where a step's logs come from is seen while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from ktrainer.steps.metric_logs import LoggedResults


class Counting(keras.Model):
    """Two means, of which the second is updated by no step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.idle = keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="idle")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean, self.idle]


def noted(step: Callable[[Counting, Any], dict[str, Any]]) -> LoggedResults:
    """What is known of a step that was traced once, with metrics that have changed since."""
    model = Counting()

    def updated(value: Any) -> dict[str, Any]:
        model.mean.update_state(value)
        return step(model, value)

    logged = LoggedResults(model)
    with logged.recording():
        function = tf.function(logged.noting(updated), autograph=False)
        function.get_concrete_function(tf.TensorSpec([], tf.float32))
    model.reset_metrics()
    model.mean.update_state([3.0, 5.0])
    return logged


def test_a_result_of_any_name_and_what_is_computed_of_it() -> None:
    logged = noted(
        lambda model, value: {
            "loss": model.mean.result(),
            "squared": model.mean.result() ** 2 + 1,
            "called": tf.function(lambda mean: tf.cond(mean > 3, lambda: mean, lambda: 0.0))(
                model.mean.result()
            ),
            "idle": value,
            "batch": 2 * value,
        }
    )
    now = logged.now(logged.logs)
    assert {path: float(value) for path, value in now.items()} == {
        ("loss",): 4.0,
        ("squared",): 17.0,
        ("called",): 4.0,
    }
    assert set(logged.sources) == {("loss",), ("squared",), ("called",), ("idle",)}
    assert logged.sources[("idle",)] is None  # no metric's, though called like one


def test_results_in_inner_dicts_and_lists() -> None:
    logged = noted(
        lambda model, value: {
            "inner": {"mean": model.mean.result(), "idle": value},
            "list": [value, {"twice": 2 * model.mean.result()}],
        }
    )
    now = logged.now(logged.logs)
    assert {path: float(value) for path, value in now.items()} == {
        ("inner", "mean"): 4.0,
        ("list", 1, "twice"): 8.0,
    }


def test_a_name_decides_where_nothing_else_does() -> None:
    logged = noted(lambda model, value: {"mean": model.mean.result() + 0 * value})
    assert logged.sources == {}
    now = logged.now({"mean": 0, "other": 0, "inner": {"mean": 0}})
    assert {path: float(value) for path, value in now.items()} == {("mean",): 4.0}


def test_a_log_that_also_needs_the_batch_is_told() -> None:
    with pytest.warns(UserWarning, match="the log 'ratio' is computed from results"):
        logged = noted(lambda model, value: {"ratio": value / model.mean.result()})
    assert logged.now(logged.logs) == {}
