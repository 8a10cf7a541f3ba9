"""Horovod's callbacks under Keras' own `fit` on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.callbacks.helpers import EachStep, data, fit, rate_of, small_model
from tests.dataparallel.helpers import caught, started


class _RestoreOnFirst:
    """Weights that rank 0 alone has, as after a restore."""

    def __new__(cls, rank: int) -> Any:
        import keras

        class Restore(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                if rank == 0:
                    for variable in self.model.trainable_variables:
                        variable.assign(variable * 0 + 0.25)

        return Restore()


def _first_step() -> list[list[np.ndarray]]:
    """The weights that the first step of each rank starts with."""
    import keras

    with started() as hvd:
        model = small_model(seed=hvd.rank())
        seen: list[list[np.ndarray]] = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if not seen:
                    seen.append([v.numpy() for v in self.model.trainable_variables])

        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, [_RestoreOnFirst(hvd.rank()), start, Look()])
        return seen[0]


def test_step_1_begins_with_the_weights_of_the_root(ranks: Callable[..., Any]) -> None:
    for weights in ranks(2).run(_first_step):
        assert all(np.all(value == 0.25) for value in weights)


def _metrics() -> tuple[dict[str, float], dict[str, float]]:
    import keras

    with started() as hvd:
        x, y = data(60)
        y = (y > 0).astype("float32")
        mine = slice(0, 20) if hvd.rank() == 0 else slice(20, 60)  # uneven
        metrics = [keras.metrics.AUC(name="auc"), "mae"]
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics)
        average = hvd.callbacks.MetricAverageCallback()
        kwargs = {"verbose": 0, "shuffle": False, "batch_size": 10}
        history = model.fit(x[mine], y[mine], callbacks=[average], **kwargs).history
        whole = model.fit(x, y, **kwargs).history
        return {k: v[0] for k, v in history.items()}, {k: v[0] for k, v in whole.items()}


def test_metrics_of_uneven_shards_are_those_of_all_data(ranks: Callable[..., Any]) -> None:
    for averaged, whole in ranks(2).run(_metrics):
        assert averaged.keys() == whole.keys()
        for name, value in whole.items():
            assert averaged[name] == pytest.approx(value, abs=1e-6), name


STEPS, INITIAL = 5, 0.2


def _rates(kind: str, epochs: int, first: int = 0) -> list[float]:
    import keras

    with started() as hvd:
        callbacks: list[Any] = []
        if kind != "schedule":
            callbacks.append(hvd.callbacks.LearningRateWarmupCallback(INITIAL, warmup_epochs=2))
        if kind != "warmup":
            schedule = hvd.callbacks.LearningRateScheduleCallback
            callbacks += [
                schedule(INITIAL, 1.0, start_epoch=2, end_epoch=3),
                schedule(INITIAL, lambda epoch: 0.1**epoch, start_epoch=3, end_epoch=4),
                schedule(INITIAL, lambda epoch: 1 / (1 + epoch), start_epoch=4, staircase=False),
            ]
        each = EachStep(rate_of)
        optimizer = keras.optimizers.SGD(INITIAL, momentum=0.9)
        fit(small_model(optimizer), [*callbacks, each], epochs, initial_epoch=first)
        return each.seen


def _expected(kind: str, epochs: int, size: int) -> list[float]:
    rates = []
    for step in range(epochs * STEPS):
        epoch, position = step // STEPS, step / STEPS
        rate = INITIAL
        if kind != "schedule" and position < 2:
            rate = INITIAL / size * (position * (size - 1) / 2 + 1)
        if kind != "warmup" and epoch == 3:
            rate = INITIAL * 0.1**3
        if kind != "warmup" and epoch >= 4:
            rate = INITIAL / (1 + position)
        rates.append(rate)
    return rates


@pytest.mark.parametrize("kind", ["warmup", "schedule", "both"])
def test_rates_are_the_formulas_and_do_not_compound(ranks: Callable[..., Any], kind: str) -> None:
    exact = _expected(kind, 6, 2)
    for found in ranks(2).run(_rates, kind, 6):
        np.testing.assert_allclose(found, exact, rtol=1e-6)
    if kind == "both":  # a run that continues in the fourth epoch
        for found in ranks(2).run(_rates, kind, 6, 4):
            np.testing.assert_allclose(found, exact[4 * STEPS :], rtol=1e-6)


def _schedule_object() -> tuple[list[float], str]:
    import keras

    with started() as hvd:
        decay = keras.optimizers.schedules.ExponentialDecay(0.5, 5, 0.5)
        halve = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch)
        each = EachStep(lambda model: float(model.optimizer._get_current_learning_rate()))
        fit(small_model(keras.optimizers.SGD(decay)), [halve, each], 2)
        unknown = hvd.callbacks.LearningRateWarmupCallback(0.1)

        def rows() -> Any:
            while True:
                yield data(10)

        error = caught(lambda: small_model().fit(rows(), callbacks=[unknown], verbose=0))
        return each.seen, error


def test_a_schedule_object_is_multiplied(ranks: Callable[..., Any]) -> None:
    for found, error in ranks(2).run(_schedule_object):
        exact = [0.5 * 0.5 ** ((k + 1) / 5) * 0.5 ** (k // 5) for k in range(10)]
        np.testing.assert_allclose(found, exact, rtol=1e-6)
        assert "Give steps_per_epoch" in error


def _momentum() -> tuple[np.ndarray, np.ndarray]:
    import keras

    with started() as hvd:
        step = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
        model = small_model(keras.optimizers.SGD(0.1, momentum=0.9))
        slots: list[np.ndarray] = []

        class Slots(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                slots.append(self.model.optimizer.momentums[0].numpy())

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if len(slots) == 1:
                    slots.append(self.model.optimizer.momentums[0].numpy())

        fit(model, [step, Slots()], 2)
        return slots[0], slots[1]


def test_momentum_is_corrected_when_the_rate_changes(ranks: Callable[..., Any]) -> None:
    before, after = ranks(1).run(_momentum)[0]
    assert before.any()
    np.testing.assert_allclose(after, before * 0.5, rtol=1e-6)
