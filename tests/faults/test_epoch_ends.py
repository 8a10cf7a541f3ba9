"""Row 7, at the last update of an epoch: what is due after it comes once, whenever the run ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ktrainer
from ktrainer.checkpoint import Store
from tests.faults import asking
from tests.faults.asking import Asks
from tests.faults.runs import CASES, STEPS, Case, classes, network, train
from tests.faults.test_resume import differences, on_ranks, resumed

EVENTS = ("on_train_batch_end", "on_log", "on_validation_end", "on_epoch_end")


class Hears(ktrainer.Callback):
    """Counts events, over restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = dict.fromkeys(EVENTS, 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.heard["on_train_batch_end"] += 1

    def on_log(self, step: int, logs: Any) -> None:
        self.heard["on_log"] += 1

    def on_validation_end(self, step: int, logs: Any) -> None:
        self.heard["on_validation_end"] += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.heard["on_epoch_end"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.heard)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard = dict(state)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("every", "last", "steps"), [("2ba", "20", (3, 4)), ("1ba", "8", (8,))])
def test_row_07_validation_inside_epochs(
    tmp_path: Path, every: str, last: str, steps: tuple[int, ...]
) -> None:
    """Epochs of two updates; after the fourth, both the validation and the epoch's end are due."""
    more = (f"trainer.validate_every={every}", "logging.every=2ba", f"trainer.max_steps={last}")
    judged, hears = CASES["judged"], list[Hears]()

    def callbacks() -> list[Any]:
        hears.append(Hears())
        return [*judged.callbacks(), hears[-1]]

    case = replace(judged, callbacks=callbacks)
    whole = train(tmp_path / "whole", case, *more)
    assert whole.step == STEPS
    assert len(whole.history["val_loss"]) == 4
    for step in steps:
        found = resumed(tmp_path / "whole", tmp_path, case, step, *more)
        assert not differences(found, whole), step
        assert hears[-1].heard == hears[0].heard, step


@pytest.mark.quick("3-3")
@pytest.mark.parametrize(("step", "last"), [(3, 3), (3, 8)])
def test_row_08_in_a_validation_at_the_end(tmp_path: Path, step: int, last: int) -> None:
    """Inside an epoch, at the run's end or before; what was validated is the best."""
    words = ("trainer.validate_every=1ba", "checkpoint.best=val_loss", f"trainer.max_steps={last}")
    expected, _ = asking.whole(tmp_path, "compiled", *words)
    ended, found, _ = asking.in_two(tmp_path, "compiled", Asks(step, during="validation"), *words)
    assert ended.step == step
    assert not differences(found, expected)
    both = [best(tmp_path / name) for name in ("whole", f"validation {step}")]
    assert both[0] == both[1]
    assert both[0][0]


def best(run: Path) -> list[tuple[int, float]]:
    """Steps whose checkpoints were the best, with their values."""
    entries = Store(run / "checkpoints").entries()
    return [(e.step, e.metric[1]) for e in entries if e.metric is not None]


class Furthest(keras.metrics.Metric):
    """The largest output so far: its state does not add up over ranks."""

    def __init__(self) -> None:
        super().__init__(name="furthest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.most.assign(tf.maximum(self.most, tf.reduce_max(outputs)))

    def result(self) -> Any:
        return self.most.value


class Logging(keras.Sequential):
    """Has logs that are of the last batch, and some that are no numbers."""

    def train_step(self, batch: Any) -> Any:
        total = tf.reduce_sum(batch[0])
        more = {"parts": {"half": total / 2}, "nothing": None, "word": "no number"}
        return {**super().train_step(batch), "total": total, **more}


def logging() -> Any:
    model = network(Logging)
    metrics = ["accuracy", Furthest()]
    model.compile(keras.optimizers.Adam(0.05), classes(), metrics=metrics)
    return model


CASES["logs"] = Case(logging, 8, ("trainer.epochs=4",))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:averaging the results of furthest")
def test_row_07_logs_of_an_epoch(ranks: Callable[..., Any], tmp_path: Path) -> None:
    words = (str(tmp_path), "logs", [3], "backend=data_parallel")
    assert ranks(2).run(on_these, *words, deadline=120) == [[[]]] * 2


def on_these(*args: Any) -> list[list[str]]:
    """As `on_ranks`, in a process that has this file's case."""
    return on_ranks(*args)
