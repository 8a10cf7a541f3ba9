"""The parts of elastic recovery, in one process: backup, counts, and what is refused."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.callbacks.learning_rate import LearningRate
from ktrainer.callbacks.loss_guard import LossGuard
from ktrainer.data import Files
from ktrainer.distributed import SingleWorld
from ktrainer.elastic.elastic_recovery import ElasticRecovery, updates_in_parts
from ktrainer.elastic.just_in_time_recovery import JustInTimeRecovery
from ktrainer.elastic.recovery_point import MetricCountsRow, VariableBackup
from ktrainer.elastic.requirements import check_callbacks, check_data, check_reopened
from ktrainer.errors import ConfigError, DataError, PeerLost, RanksLost
from ktrainer.state.durations import Every
from ktrainer.state.progress import Progress
from ktrainer.training.loop import drive
from ktrainer.training.loop_state import LoopModel


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


def test_a_momentum_that_follows_the_learning_rate_is_undone() -> None:
    """A callback scales it before the step, and will when the step is repeated."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    backup, slots = VariableBackup(model, several=False), model.optimizer.momentums
    before = [slot.numpy() for slot in slots]
    backup.keep()
    for slot in slots:
        slot.assign(0.5 * slot)
    backup.begin_step()
    backup.undo()
    for slot, value in zip(slots, before, strict=True):
        np.testing.assert_array_equal(slot, value)


class ClipsWeights(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.layers[0].kernel.assign(np.zeros((4, 3)))


@pytest.mark.parametrize(
    ("callback", "in_parts"),
    [
        (LearningRate(), False),
        (ClipsWeights(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_begin=print), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), False),
    ],
)
def test_weights_that_change_before_an_update_are_kept(callback: Any, in_parts: bool) -> None:
    trainer = SimpleNamespace(accumulate=1, asks_for_several_steps=False)
    context = SimpleNamespace(config=SimpleNamespace(trainer=trainer))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    of: Any = SimpleNamespace(context=context, model=model, every=[callback])
    assert updates_in_parts(of) is in_parts
    model.optimizer.build(model.trainable_variables)
    of.model = LoopModel([model], [model.optimizer], {})
    assert updates_in_parts(of)


def test_outside_of_steps_everything_is_undone() -> None:
    model = network()
    backup, before = VariableBackup(model, several=False), values(model)
    backup.keep()
    model.layers[0].kernel.assign(np.zeros((4, 3)))
    model.optimizer.learning_rate = 7.0
    backup.undo()
    for now, then in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


class Largest(keras.metrics.Metric):
    """The largest target: not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self) -> Any:
        return self.value


def test_counts_of_another_rank_are_added() -> None:
    """Those of each metric that adds up, while there is room: the smallest come first."""
    curve = keras.metrics.AUC(multi_label=True, num_labels=100)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(100, "sigmoid")])
    model.error = keras.metrics.MeanAbsoluteError()  # Keras lists it twice
    model.compile("sgd", "mse", metrics=[curve, Largest(), model.error])
    model.fit(np.ones((4, 4)), np.ones((4, 100)), verbose=0)
    sums, every = MetricCountsRow(model, only_sums=True), MetricCountsRow(model)
    before = every.states()
    assert sums.omitted == ["largest", curve.name]
    assert every.omitted == [curve.name]
    assert sums.row().size == 4
    known = every.states(every.row())
    sums.add(sums.row())
    found = {id(v): v.numpy() for v in model.metrics_variables}
    of_curve, largest = [id(v) for v in curve.variables], id(model.metrics[1].metrics[1].value)
    for variable, then, row in zip(model.metrics_variables, before, known, strict=True):
        kept = id(variable) in (*of_curve, largest)
        np.testing.assert_array_equal(found[id(variable)], then if kept else 2 * then)
        np.testing.assert_array_equal(row, 0 * then if id(variable) in of_curve else then)
        assert (row.dtype, row.shape) == (then.dtype, then.shape)


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
    loader.sampler = shuffled = type("RandomSampler", (), {})()
    with pytest.raises(DataError, match="DataLoader with RandomSampler may draw another one"):
        check_data(loader, source())
    loader.sampler = type("SequentialSampler", (), {})()
    check_data(loader, source())
    loader.batch_sampler = type("BatchSampler", (), {"sampler": loader.sampler})()
    check_data(loader, source())
    loader.in_order = False
    with pytest.raises(DataError, match="DataLoader with in_order=False may draw another one"):
        check_data(loader, source())
    loader.in_order = True
    loader.batch_sampler = type("BatchSampler", (), {"sampler": shuffled})()
    with pytest.raises(DataError, match="DataLoader with RandomSampler may draw another one"):
        check_data(loader, source())
    loader.batch_sampler = type("ByLength", (), {})()
    with pytest.raises(DataError, match="DataLoader with ByLength may draw another one"):
        check_data(loader, source())
    with pytest.raises(DataError, match="Turning may have changed its own by on_epoch_begin"):
        check_data(type("Turning", (keras.utils.PyDataset,), {"on_epoch_end": print})(), source())
    check_data(type("Steady", (keras.utils.PyDataset,), {})(), source())


class Iterable:
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize("data", [lambda: None, Iterable(), Files([], tf.data.TFRecordDataset)])
def test_data_that_is_another_when_it_is_opened_again(data: Any) -> None:
    def run(again: dict[str, str], data: Any = data) -> Any:
        found = SimpleNamespace(
            state=SimpleNamespace(data_facts={"training/x": "1"}, feed=source()),
            call=SimpleNamespace(data=data, validation_data=None),
            feeds=SimpleNamespace(
                lengths=[None], facts=lambda: again, reopen=lambda order, lengths: None
            ),
        )
        found.state.feed.shuffle_order = None
        return found

    world: Any = SingleWorld()
    check_reopened(run({"training/x": "1"}), world)
    with pytest.raises(DataError, match=r"opened a second time, gave another training/x"):
        check_reopened(run({"training/x": "2"}), world)
    check_reopened(run({"training/x": "2"}, (np.ones((4, 1)),)), world)  # arrays are at hand


def test_what_follows_a_lost_update_has_errors_of_its_own() -> None:
    """With the loss as their context, they would count as losses."""

    def running() -> Any:
        with pytest.raises(PeerLost):
            yield []
        raise ValueError("of a callback")

    def update(updates: Any) -> None:
        raise PeerLost("in the update")

    with pytest.raises(ValueError, match="of a callback") as raised:
        drive(running(), update)
    assert raised.value.__context__ is None


class Recovers:
    """Stands for a recovery that ends the run, its world and its loop."""

    alone, phases, stable_rank, members = False, 0, 0, ()

    def __init__(self) -> None:
        self.world = self.state = self.counted = self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: True

    def updates(self) -> Any:
        yield []

    def _end(self, error: Exception) -> None:
        raise RanksLost("the others", None) from error

    def _recover(self, loop: Any, error: Exception) -> None:
        self._end(error)


@pytest.mark.parametrize(
    "updates",
    [Recovers.updates, ElasticRecovery.updates, JustInTimeRecovery.updates],
    ids=["none", "elastic", "just in time"],
)
def test_an_error_of_an_update_is_freed_at_once(updates: Any) -> None:
    """With all that its traceback has, such as batches."""
    recovery, arguments = Recovers(), [] if updates is Recovers.updates else [Recovers()]
    errors = []

    class Lost(PeerLost):
        def __init__(self) -> None:
            errors.append(weakref.ref(self))

    def update(updates: Any) -> None:
        raise Lost

    gc.disable()
    try:
        with suppress(PeerLost, RanksLost):
            drive(updates(recovery, *arguments), update)
        assert [error() for error in errors] == [None]
    finally:
        gc.enable()


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
