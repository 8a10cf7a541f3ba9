"""Watched values: closed forms, and the numbers of one process under every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from ktrainer import Callback, ConfigError, Trainer
from ktrainer.callbacks import TensorBoardLog
from ktrainer.callbacks.tensorboard_histograms import TensorBoardHistograms
from ktrainer.callbacks.watch import LearningRateWatch, MemoryWatch, SpeedWatch, forward_flops
from ktrainer.callbacks.watch_norms import NormWatch
from ktrainer.config import load_config
from ktrainer.runtime.history_file import read_events
from ktrainer.training.updates_per_call import max_updates_per_call
from tests.contracts.running import use_float64, with_ktrainer
from tests.contracts.zoo import ZOO
from tests.dist.harness import keras_state
from tests.small import build, data, trainer
from tests.tf_distribute.running import under

RATE = 0.1


class Rows(Callback):
    """Keeps the logs of `on_log`, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def on_log(self, step: int, logs: Any) -> None:
        self.rows[step] = dict(logs)


def line() -> keras.Model:
    """y = w x, whose gradient is known."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, name="w")])
    model.layers[0].set_weights([np.array([[0.5], [-1.0], [2.0]])])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def test_norms_of_a_line() -> None:
    """Before clipping; only at the updates that are due, each of which has a row."""
    use_float64()
    random, rows = np.random.default_rng(0), Rows()
    x, y = random.normal(size=(12, 3)), random.normal(size=(12, 1))
    words = {"watch__norms": "2ba", "watch__layers": True, "logging__every": "100ba"}
    with trainer([rows], **words, trainer__clip__global_norm=0.5) as it:
        it.fit(line, (x, y))
    weight = np.array([[0.5], [-1.0], [2.0]])
    for i in range(2):
        a, b = x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]
        gradient, before = 2 * a.T @ (a @ weight - b) / 4, weight
        norm = np.linalg.norm(gradient)
        weight = weight - RATE * gradient * min(1.0, 0.5 / norm)
    assert list(rows.rows) == [2]
    ratio = np.linalg.norm(weight - before) / np.linalg.norm(before)
    for end in ("", "/w"):
        found = [
            rows.rows[2][f"norm/{name}{end}"] for name in ("gradient", "weight", "update_ratio")
        ]
        np.testing.assert_allclose(found, [norm, np.linalg.norm(weight), ratio], rtol=1e-12)
    assert {"loss"} < rows.rows[2].keys()


def norms_of(name: str, **settings: Any) -> dict[int, dict[str, float]]:
    keras_state.clear()  # and with it the numbers in layers' names
    use_float64()
    rows = Rows()
    watch = {"norms": "1ba", "layers": True, "learning_rate": True}
    with_ktrainer(ZOO[name], callbacks=[rows], watch=watch, **settings)
    return {
        step: {key: value for key, value in logs.items() if "/" in key or key == "learning_rate"}
        for step, logs in rows.rows.items()
    }


PIPELINE = {"name": "pipeline", "partitions": 2, "microbatches": 2}
BACKENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "data_parallel": (2, {"name": "data_parallel", "engine": "mpi"}),
    "pipeline": (2, PIPELINE),
    "hybrid": (2, {**PIPELINE, "partitions": 1}),
    "mirrored": (1, {"name": "tf_distribute", "strategy": "mirrored", "devices": 2}),
}


RECURRENT = [("masked_lstm", "data_parallel"), ("masked_lstm", "pipeline")]


@pytest.mark.quick("mlp-data_parallel", "mlp-pipeline")
@pytest.mark.parametrize(
    ("name", "backend"), [*(("mlp", backend) for backend in BACKENDS), *RECURRENT]
)
def test_norms_equal_those_of_one_process(
    ranks: Callable[..., Any], backend: str, name: str
) -> None:
    """Also with rows of embeddings as gradients, and where a stage has a part of the model."""
    truth = norms_of(name, backend={"name": "local"})
    assert len(truth) == 6
    layers = {key.rpartition("/")[2] for key in truth[1] if key.startswith("norm/gradient/")}
    assert len(layers) > 1
    size, settings = BACKENDS[backend]
    for ours in under(
        ranks,
        settings.get("strategy", "data_parallel"),
        norms_of,
        name,
        backend=settings,
        size=size,
    ):
        close(ours, truth)


def close(ours: Any, truth: Any, tolerance: float = 1e-9) -> None:
    assert ours.keys() == truth.keys()
    for step, values in truth.items():
        assert ours[step].keys() == values.keys()
        for key, value in values.items():
            np.testing.assert_allclose(
                ours[step][key], value, rtol=tolerance, err_msg=f"{step} {key}"
            )


def test_norms_of_accumulated_updates() -> None:
    """Those of a batch twice as large."""
    halves = {"data": {"batch_size": 8}, "trainer": {"accumulate": 2}}
    close(norms_of("mlp", **halves), norms_of("mlp"))


def clipped(**more: Any) -> Callable[[], keras.Model]:
    return lambda: build(keras.optimizers.SGD(RATE, **more), eager=False)


def test_norms_do_not_hold_the_scale_of_the_loss() -> None:
    """That of the optimizer's own, by which it divides gradients; nor does what clipping sees."""
    found = []
    for more in ({}, {"loss_scale_factor": 64.0}):
        rows = Rows()
        words = {"watch__norms": "1ba", "trainer__clip__global_norm": 0.5}
        with trainer([rows], **words) as it:
            it.fit(clipped(**more), data())
        found.append(rows.rows)
    close(found[1], found[0], 1e-6)


class Limits(Callback):
    """Keeps the most updates in a call for which callbacks can wait, after the first update."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__()
        self.callbacks, self.found = callbacks, []

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if step == 1:
            self.found = [max_updates_per_call(each) for each in self.callbacks]


def test_calls_are_as_long_as_nothing_is_due(tmp_path: Path) -> None:
    watches = [NormWatch("50ba"), SpeedWatch(), MemoryWatch(), LearningRateWatch()]
    watches += [TensorBoardHistograms("20ba"), TensorBoardLog()]
    limits = Limits(watches)
    with trainer([limits, *watches], run__dir=tmp_path) as it:
        it.fit(build, data())
    assert limits.found == [48, None, None, None, 18, None]


def test_several_updates_a_call_have_the_same_norms() -> None:
    """The update that is due is a call of its own, so the change of the weights is one update's."""
    found = []
    for per_call in ("1", "auto"):
        rows = Rows()
        words = {"watch__norms": "5ba", "trainer__epochs": 3, "trainer__steps_per_call": per_call}
        with trainer([rows], **words, health__nan="ignore", health__audit_every="null") as it:
            it.fit(lambda: build(eager=False), data())
        found.append(rows.rows)
    assert list(found[0]) == [5, 10, 15]
    assert found[0] == found[1]


def test_a_skipped_update_has_no_gradient_norm() -> None:
    rows, (x, y) = Rows(), data()
    x[4:8] = np.nan
    skipped = pytest.warns(UserWarning, match="the update was skipped")
    with trainer([rows], watch__norms="1ba", health__nan="skip") as it, skipped:
        it.fit(build, (x, y))
    assert "norm/gradient" not in rows.rows[2]
    assert rows.rows[2]["norm/update_ratio"] == 0.0
    assert all(math.isfinite(rows.rows[step]["norm/gradient"]) for step in (1, 3))


def test_operations_of_a_forward_pass() -> None:
    """Two for each weight of a dense layer, one for a bias and an activation."""
    model = build()
    spec = (tf.TensorSpec([None, 6]), tf.TensorSpec([None]))
    assert forward_flops(model, spec) == 2 * (6 * 5 + 5 * 3) + (5 + 5 + 3)
    any_length = (tf.TensorSpec([None, None]), tf.TensorSpec([None]))
    with pytest.raises(ConfigError, match=r"watch\.utilization.*Pad all inputs"):
        forward_flops(model, any_length)


def test_speed_memory_and_rate() -> None:
    rows = Rows()
    words = {"watch__speed": True, "watch__tokens": 7, "watch__utilization": True}
    words |= {"watch__memory": True, "watch__learning_rate": True}
    with trainer(
        [rows], **words, logging__every="2ba", lr__schedule="[{start: 4ba, multiplier: 0.5}]"
    ) as it:
        it.fit(build, data())
    assert [row["learning_rate"] for row in rows.rows.values()] == pytest.approx([0.1, 0.1, 0.05])
    process = psutil.Process().memory_info().rss / 2**20
    for row in rows.rows.values():
        assert row["speed/tokens_per_second"] == 7 * row["speed/examples_per_second"] > 0
        assert 0 < row["speed/utilization"] < 1
        assert row["memory/process_mib"] == pytest.approx(process, rel=0.2)
        assert row["memory/process_peak_mib"] >= 0.99 * row["memory/process_mib"]


def logged(watch: dict[str, Any], **backend: Any) -> dict[int, dict[str, float]]:
    rows = Rows()
    logging = {"progress": "none", "csv": False, "every": "2ba"}
    with_ktrainer(ZOO["mlp"], callbacks=[rows], watch=watch, logging=logging, backend=backend)
    return rows.rows


def test_ranks_log_the_same(ranks: Callable[..., Any]) -> None:
    watch = {"speed": True, "memory": True, "communication": True, "utilization": True}
    first, second = ranks(2).run(logged, watch, name="data_parallel", engine="mpi")
    assert first == second
    weights = sum(math.prod(v.shape) for v in ZOO["mlp"].build().trainable_variables)
    assert {row["communication/bytes_per_update"] for row in first.values()} == {4.0 * weights}


@pytest.mark.exhaustive
def test_stages_log_the_same(ranks: Callable[..., Any]) -> None:
    """The operations are those of the whole model, of which each has a part."""
    watch = {"speed": True, "memory": True, "utilization": True, "learning_rate": True}
    first, second = ranks(2).run(logged, watch, **PIPELINE)
    assert first == second
    assert all(0 < row["speed/utilization"] < 1 for row in first.values())


def test_what_the_record_keeps_and_compares(tmp_path: Any) -> None:
    """Speed and memory of two equal runs differ, which is no difference of theirs."""
    from ktrainer.runs.run_differences import compare
    from ktrainer.runs.run_record import RunRecord

    words = ["watch.speed=true", "watch.memory=true", "watch.norms=1ba", "seed=1"]
    for name in "ab":
        config = {"logging": {"progress": "none", "every": "1ba"}, "data": {"batch_size": 4}}
        with Trainer(config, overrides=[f"run.dir={tmp_path / name}", *words]) as it:
            it.fit(build, data())
    found = compare(RunRecord(tmp_path / "a"), RunRecord(tmp_path / "b"))
    assert (found.points, found.first) == (7, {})
    (row, *_) = [e for e in read_events(tmp_path / "a" / "history.jsonl") if e["event"] == "log"]
    assert {"norm/gradient", "speed/examples_per_second"} & row["metrics"].keys()
    assert "norm/gradient" in (tmp_path / "a" / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["watch.norms=1ep"], r"watch\.norms: .*updates"),
        (["watch.layers=true"], r"watch\.layers: has no effect without watch\.norms"),
        (["watch.communication=true"], r"watch\.communication: .*data_parallel"),
        (["watch.norms=5ba", "trainer.steps_per_call=4"], r"watch\.norms: .*steps_per_call=4"),
        (
            ["watch.norms=5ba", "backend=tf_distribute", "backend.strategy=parameter_server"],
            r"watch\.norms: gradients stay on the workers",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, words)
