"""Row 20: a loss that is not finite, or a spike: all ranks act at that step, before saving."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from ktrainer import Callback, ConfigError, ModelError
from ktrainer.callbacks import LossGuard
from ktrainer.checkpoint import Store
from ktrainer.config import load_config
from tests.faults import spoiling
from tests.faults.asking import BACKENDS
from tests.faults.spoiling import CASES, ROLLBACK, SPIKE, differences, on_ranks, stopped, train
from tests.tf_distribute.running import CLUSTER, ONE_PROCESS


@pytest.mark.exhaustive
def test_row_20_local(tmp_path: Path) -> None:
    assert on_ranks(str(tmp_path), "local", ["spike"]) == [[]]
    words = ("trainer.xla=true", "health.nan=skip")  # compiled alike
    assert on_ranks(str(tmp_path / "2"), "local", ["inf"], *words) == [[]]
    step, steps, said = stopped(str(tmp_path / "stop"))
    assert (step, steps) == (4, [1, 2, 3])
    assert len(said) == 1
    assert "not finite at step 4" in said[0]


@pytest.mark.exhaustive
def test_row_20_data_parallel(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Only rank 1 sees the bad rows."""
    group, words = ranks(2), ("data_parallel", ["rollback"])
    assert group.run(on_ranks, str(tmp_path), *words, deadline=180) == [[[]]] * 2
    words = ("data_parallel", ["spike in parts"], "trainer.accumulate=2", "backend.op=sum")
    assert group.run(on_ranks, str(tmp_path / "2"), *words, deadline=180) == [[[]]] * 2
    both = group.run(stopped, str(tmp_path / "stop"), "backend=data_parallel", deadline=120)
    assert [found[:2] for found in both] == [(4, [1, 2, 3])] * 2
    assert "on rank 1" in both[0][2][0]


@pytest.mark.exhaustive
def test_row_20_pipeline(ranks: Callable[..., Any], tmp_path: Path) -> None:
    words = ("pipeline", ["spike", "rollback"])
    assert ranks(2).run(on_ranks, str(tmp_path), *words, deadline=180) == [[[]] * 2] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "size"), [("pipeline", 2), ("strategy", 1)])
def test_row_20_stop(ranks: Callable[..., Any], tmp_path: Path, backend: str, size: int) -> None:
    group = ranks(size, ONE_PROCESS if backend == "strategy" else "")
    every = group.run(stopped, str(tmp_path), *BACKENDS[backend], deadline=120)
    assert [found[:2] for found in every] == [(4, [1, 2, 3])] * size
    assert "not finite at step 4" in every[0][2][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_row_20_tf_distribute(ranks: Callable[..., Any], tmp_path: Path, strategy: str) -> None:
    names = ["rollback"] if strategy == "mirrored" else ["spike"]
    words = ("strategy", names, f"backend.strategy={strategy}", "health.nan=skip")
    found = ranks(1, ONE_PROCESS).run(on_ranks, str(tmp_path), *words, deadline=180)
    assert found == [[[]]]


@pytest.mark.exhaustive
def test_row_20_workers(ranks: Callable[..., Any], tmp_path: Path) -> None:
    group, words = ranks(2, f"{CLUSTER} 1"), ("workers", ["nan"], "health.nan=skip")
    assert group.run(on_ranks, str(tmp_path), *words, deadline=180) == [[[]]] * 2


def half() -> Any:
    built = spoiling.model()
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=1024.0, dynamic_growth_steps=100
    )
    built.compile(scaled, "mse", metrics=["mae"])
    return built


def halved(folder: Path, *words: str) -> list[str]:
    """In what a run with a bad batch differs from the one without it."""
    words = (*words, "trainer.precision=mixed_float16")
    found = train(folder / "bad", (*words, "health.nan=skip"), {3: math.nan}, build=half)
    return differences(found, train(folder / "good", words, without=(3,), build=half))


@pytest.mark.quick("local")
@pytest.mark.parametrize("backend", ["local", "data_parallel", "pipeline"])
def test_row_20_a_loss_scale_is_halved(
    ranks: Callable[..., Any], tmp_path: Path, backend: str
) -> None:
    if backend == "local":
        by_rank = [halved(tmp_path)]
    else:
        by_rank = ranks(2).run(halved, tmp_path, *BACKENDS[backend], deadline=120)
    for names in by_rank:
        assert [n for n in names if "dynamic_scale" not in n and "step_counter" not in n] == []
        assert any("dynamic_scale" in n for n in names)


@pytest.mark.exhaustive
def test_row_20_several_updates_in_a_call(tmp_path: Path) -> None:
    words = ("trainer.steps_per_call=4", "health.nan=skip")
    found = train(tmp_path / "bad", words, {3: math.nan})
    assert not differences(found, train(tmp_path / "good", words, without=(3,)))
    assert found.said == ["a loss was bad by step 4: 1 update was skipped"]


def test_row_20_limits(tmp_path: Path) -> None:
    """Not for ever: neither in a row nor back and forth."""
    every = dict.fromkeys(range(3, 9), math.nan)
    found = train(tmp_path / "skips", ("health.nan=skip", "health.max_skips=2"), every)
    assert found.step == 4
    assert "at step 4: the update was skipped, as were 2 in a row" in found.said[-1]
    found = train(tmp_path / "back", (*ROLLBACK, "health.max_rollbacks=2"), every)
    assert found.steps == [2]
    assert all(text.startswith("the loss is not finite at step 3") for text in found.said[:2])
    assert "after 2 rollbacks (health.max_rollbacks)" in found.said[2]
    found = train(tmp_path / "none", (*ROLLBACK, "checkpoint.every=5ba"), {2: math.nan})
    assert found.step == 2
    assert "there is no checkpoint to go back to" in found.said[0]


def test_row_20_back_after_a_resume_by_path(tmp_path: Path) -> None:
    """Not forward, to a checkpoint of before the resume."""
    train(tmp_path, ROLLBACK)
    (second,) = [e.path for e in Store(tmp_path / "checkpoints").entries() if e.step == 2]
    words = (*ROLLBACK, f"checkpoint.resume={second}", "checkpoint.every=4ba")
    found = train(tmp_path, words, {3: math.nan, 6: math.nan})
    backs = [text for text in found.said if "back to" in text]
    assert ["of step 2," in backs[0], "of step 4," in backs[1]] == [True, True]
    assert (found.step, found.steps) == (6, [2, 4, 6, 8])


def test_row_20_nothing_is_no_loss_of_zero(tmp_path: Path) -> None:
    """Where all updates of an epoch were left out or made undone, it has no loss."""
    more = ("checkpoint.best=loss", "checkpoint.mode=min", "trainer.epochs=2")
    words = ("health.nan=skip", "health.max_skips=99", *more)
    every = dict.fromkeys(range(1, 9), math.nan)
    found = train(tmp_path / "skips", words, every)
    assert (found.step, found.history, found.steps) == (16, {}, [])
    found = train(tmp_path / "back", (*ROLLBACK, *more), {8: math.nan})
    assert found.history == {}
    assert sum("back to the checkpoint of step" in text for text in found.said) == 2


class GoesBack(Callback):
    """Asks for a rollback once, after `step` updates."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if step == self.step:
            self.step = 0
            self.trainer.request_rollback("of a test")


def test_row_20_back_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    """What was reported of the epoch stays: it is over, and does not come again."""
    words = ("checkpoint.every=6ba", "trainer.epochs=2", "logging.every=4ba")
    train(tmp_path, words, callbacks=[GoesBack(10)])
    with (tmp_path / "metrics.csv").open() as file:
        rows = [(row["event"], int(row["step"])) for row in csv.DictReader(file)]
    assert rows == [("log", 4), ("epoch", 8), ("log", 8), ("log", 12), ("epoch", 12)]
    lines = (tmp_path / "throughput.jsonl").read_text().splitlines()
    speeds = [json.loads(line) for line in lines]
    assert [(speed["epoch"], speed["steps"]) for speed in speeds] == [(0, 8), (1, 8)]


def test_row_20_back_after_a_spike(tmp_path: Path) -> None:
    """The losses after it are those of the steps, as if the batches since had not been there."""
    seen = []
    for name, bad, without in (("bad", {6: 1000.0}, ()), ("good", {}, (5, 6))):
        guard = LossGuard(spike=5, on_spike="rollback", window=2)
        found = train(tmp_path / name, ("checkpoint.every=2ba",), bad, without, [guard])
        assert (guard.rollbacks, len(found.said), found.step) == (len(bad), len(bad), 6)
        seen.append(list(guard.losses))
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)  # differences of a float32 total


def test_row_20_an_infinite_loss_is_no_spike(tmp_path: Path) -> None:
    """`health.nan` says what happens, though its update is skipped, as one of a spike is."""
    words = (*SPIKE, "checkpoint.every=1ba", "trainer.epochs=2")
    found = train(tmp_path / "infinite", words, {5: 1e25})
    assert (found.step, found.steps) == (5, [1, 2, 3, 4])
    assert "the loss is not finite at step 5: the update was skipped" in found.said[0]
    assert "the loss is not finite at step 5. Training stops" in found.said[1]
    for name, bad in (("spike", 1000.0), ("ignored", 1e25)):
        found = train(tmp_path / name, (*words, "health.nan=ignore"), {5: bad})
        assert (found.step, len(found.said)) == (16, 2), name


def test_row_20_a_spike_stops(tmp_path: Path) -> None:
    words = (*SPIKE[::2], "checkpoint.every=1ba", "trainer.epochs=2")
    found = train(tmp_path, words, {5: 1000.0})
    assert (found.step, found.steps) == (5, [1, 2, 3, 4])
    assert "the median before" in found.said[0]


def test_row_20_a_fit_that_is_too_short_for_spikes(tmp_path: Path) -> None:
    """Before there is a window of losses none is a spike."""
    words = ("health.spike=5", "health.spike_window=15", "trainer.epochs=2")
    assert train(tmp_path / "long", words).said == []
    found = train(tmp_path / "short", (*words, "trainer.max_steps=15"), {5: 1000.0})
    assert found.step == 15
    assert "health.spike has no effect: this fit has 15 updates" in found.said[0]
    found = train(tmp_path / "epoch", (*words, "trainer.epochs=1"))
    assert "this fit has 8 updates" in found.said[0]
    guard = LossGuard(spike=5, window=8, every=2)
    found = train(tmp_path / "every", words[2:], callbacks=[guard])
    assert "this fit has 16 updates" in found.said[0]


def test_what_cannot_be_done() -> None:
    servers = ("backend=tf_distribute", "backend.strategy=parameter_server")
    for words, says in (
        (("health.nan=rollback",), "set checkpoint.every too"),
        (("health.on_spike=skip",), "has no effect without health.spike"),
        ((*servers, "health.nan=skip"), "workers of parameter_server"),
        ((*servers, "health.spike=3"), "workers of parameter_server"),
        (
            ("backend=tf_distribute", "health.nan=skip", "trainer.accumulate=2"),
            "cannot undo them",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(None, words)


class Own(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def own() -> Any:
    built = spoiling.model()
    model = Own(built.layers)
    model.compile("sgd", "mse")
    return model


def test_a_step_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="in Keras' own train_step only"):
        train(tmp_path, SPIKE, build=own)
    found = train(tmp_path / "skip", CASES["nan"][0], CASES["nan"][1], build=own)
    assert not differences(found, train(tmp_path / "good", (), without=(3,), build=own))
