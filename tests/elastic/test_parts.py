"""The parts of elastic recovery, in one process: backup, counts, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.callbacks.loss_guard import LossGuard
from ktrainer.elastic import check_callbacks, check_data
from ktrainer.elastic.recovery_point import MetricCountsRow, VariableBackup
from ktrainer.errors import ConfigError, DataError
from ktrainer.state.durations import Every
from ktrainer.state.progress import Progress


def network() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    return model


def values(model: Any) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(v.numpy()) for v in variables]


@pytest.mark.parametrize("several", [False, True])
def test_a_step_is_undone(several: bool) -> None:
    model = network()
    backup, before = VariableBackup(model, several), values(model)
    backup.keep()
    backup.begin_step()
    model.fit(np.zeros((4, 4)), np.ones((4, 3)), verbose=0)
    after = values(model)
    backup.undo()
    # Seeds and metrics change before a step may fail, weights only after: kept as they are then.
    undone = [np.array_equal(a, b) for a, b in zip(values(model), before, strict=True)]
    changed = [not np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
    assert any(changed)
    assert all(undone) == several
    kernel = next(k for k, v in enumerate(model.variables) if v is model.layers[0].kernel)
    assert undone[kernel] == several
    assert all(undone[-len(model.metrics_variables) :])


def test_outside_of_steps_everything_is_undone() -> None:
    model = network()
    backup, before = VariableBackup(model, several=False), values(model)
    backup.keep()
    model.layers[0].kernel.assign(np.zeros((4, 3)))
    model.optimizer.learning_rate = 7.0
    backup.undo()
    for now, then in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_counts_of_another_rank_are_added() -> None:
    model = network()
    counts = MetricCountsRow(model)
    mine = counts.row()
    counts.add(mine)
    np.testing.assert_array_equal(counts.row(), 2 * mine)
    counts.assign(mine)
    np.testing.assert_array_equal(counts.row(), mine)


def source(reopens: bool = True) -> Any:
    return SimpleNamespace(source=SimpleNamespace(reopens=reopens))


def test_data_that_cannot_be_read_again() -> None:
    dataset = tf.data.Dataset.range(3)
    with pytest.raises(DataError, match="pass the function that makes it"):
        check_data(dataset, source())
    with pytest.raises(DataError, match="which a generator cannot"):
        check_data(iter([]), source(False))
    check_data(lambda: dataset, source())
    loader = type("DataLoader", (), {"__module__": "torch.utils.data.dataloader"})()
    loader.sampler = type("RandomSampler", (), {})()
    with pytest.raises(DataError, match="DataLoader with a RandomSampler may draw another one"):
        check_data(loader, source())
    loader.sampler = type("SequentialSampler", (), {})()
    check_data(loader, source())
    with pytest.raises(DataError, match="Turning may have changed its own by on_epoch_begin"):
        check_data(type("Turning", (keras.utils.PyDataset,), {"on_epoch_end": print})(), source())
    check_data(type("Steady", (keras.utils.PyDataset,), {})(), source())


def test_a_callback_that_cannot_move(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="BackupAndRestore"):
        check_callbacks([keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))])


def test_a_guard_is_given_its_state_and_no_more() -> None:
    guard = LossGuard()
    guard.losses.extend([1.0, 2.0])
    state = guard.state_dict()
    guard.load_state_dict(state)
    assert list(guard.losses) == [1.0, 2.0]


def test_healing_does_not_put_off_what_is_due_by_time() -> None:
    """Healing more often than something is due by time must not put it off for ever."""
    every = Every("10s")
    progress = Progress(step=5, batch=5, elapsed=0.0)
    every.start(progress)
    for elapsed in range(2, 10, 2):
        progress.elapsed = float(elapsed)
        every.heal(progress)
        assert not every.due(progress)
    progress.elapsed = 10.0
    every.heal(progress)
    assert every.due(progress)
