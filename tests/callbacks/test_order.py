"""The fixed order of a run's callbacks."""

from __future__ import annotations

import keras
import pytest

from ktrainer.config import load_config
from ktrainer.training.default_callbacks import make_callbacks, on_terminal


def names(config: dict, users: list) -> list[str]:
    return [type(c).__name__ for c in make_callbacks(load_config(config), users)]


def test_callbacks_are_in_their_fixed_order() -> None:
    config = {
        "callbacks": {"mine": {"type": "early_stopping", "patience": 3}},
        "checkpoint": {"every": "1ep", "best": "val_loss"},
        "lr": {"schedule": [{"start": "1ep", "multiplier": 0.1}]},
        "logging": {"tensorboard": True, "progress": "plain"},
    }
    assert names(config, [keras.callbacks.LambdaCallback()]) == [
        "BroadcastVariables",
        "LearningRate",
        "AverageMetrics",
        "LambdaCallback",
        "EarlyStopping",
        "LossGuard",
        "Audit",
        "HistoryLog",
        "Checkpoint",
        "Throughput",
        "CSVLog",
        "TensorBoardLog",
        "PlainProgress",
    ]


def test_callbacks_that_are_off_are_absent() -> None:
    config = {
        "health": {"nan": "ignore", "audit_every": None},
        "logging": {"csv": False, "progress": "none"},
    }
    assert names(config, []) == [
        "BroadcastVariables",
        "LearningRate",
        "AverageMetrics",
        "HistoryLog",
        "Throughput",
    ]


def test_the_checkpoint_keeps_the_states_of_all() -> None:
    config = load_config({"checkpoint": {"every": "1ep"}, "health": {"nan": "ignore"}})
    every = make_callbacks(config)
    (checkpoint,) = [c for c in every if type(c).__name__ == "Checkpoint"]
    assert checkpoint.callbacks == every
    assert checkpoint.allow_nan


@pytest.mark.parametrize(("told", "terminal"), [("1", True), ("0", False)])
def test_the_launcher_knows_about_the_terminal(told: str, terminal: bool) -> None:
    assert on_terminal({"KTRAINER_TERMINAL": told}) is terminal
    assert on_terminal({}) is False  # pytest's stdout is none


def test_the_pseudo_terminal_of_mpirun_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert on_terminal({}) is True
    assert on_terminal({"OMPI_COMM_WORLD_SIZE": "2"}) is False
    assert on_terminal({"OMPI_COMM_WORLD_SIZE": "2", "KTRAINER_TERMINAL": "1"}) is True
