"""The end of training, and what is due every so often."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Callback, DataError, ModelError, Trainer
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.training.updates_per_call import UpdatesPerCall
from tests.small import BATCH, ROWS, Watch, build, close, data, fit, trainer, watch


def test_epochs() -> None:
    seen, it, history = watch(trainer__epochs=3)
    assert len(history["loss"]) == 3
    assert seen.steps == list(range(1, 19))
    assert seen.batches == [0, 1, 2, 3, 4, 5] * 3
    assert (it.progress.epoch, it.progress.step, it.progress.examples) == (3, 18, 3 * ROWS)
    assert it.state.steps_per_epoch == 6


def test_max_steps_ends_in_the_middle_of_an_epoch() -> None:
    seen, it, history = watch(data(8), trainer__epochs=5, trainer__max_steps=8)
    assert seen.steps[-1] == it.progress.step == 8
    assert len(history["loss"]) == len(history["val_loss"]) == 2
    assert it.progress.examples == 8 * BATCH


class StopsAtBegin(keras.callbacks.Callback):
    """Stops as training begins, or the second epoch."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.stop_training = self.first

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model.stop_training or epoch == 1


@pytest.mark.parametrize("first", [True, False], ids=["training", "second epoch"])
@pytest.mark.parametrize("a_call", ["1", "auto"])
def test_a_stop_as_training_or_an_epoch_begins_comes_after_one_batch(
    monkeypatch: pytest.MonkeyPatch, a_call: str, first: bool
) -> None:
    """Also where calls make many updates, as they soon do in a longer training."""
    monkeypatch.setattr(UpdatesPerCall, "_auto_size", lambda self, most: most() or 6)
    x, y = data()
    model = build(eager=False)
    theirs = model.fit(
        x, y, BATCH, epochs=4, shuffle=False, verbose=0, callbacks=[StopsAtBegin(first)]
    ).history
    with trainer([StopsAtBegin(first)], trainer__epochs=4, trainer__steps_per_call=a_call) as it:
        history = it.fit(build(eager=False), (x, y)).history
        expected = (0, 1, 1) if first else (1, 1, 7)
        assert (it.progress.epoch, it.progress.batch, it.progress.step) == expected
    assert history == theirs
    close(it, model, 0)


class Judge(Callback):
    """Keeps what a checkpoint at an epoch's end would find."""

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.seen: list[tuple[bool, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        same = self.model.metrics[0].result().numpy() == np.float32(logs["loss"])
        self.seen.append((self.trainer.state.epoch_complete, bool(same)))


def test_an_epoch_that_is_cut_short_is_not_finished() -> None:
    judge = Judge()
    with trainer([judge], trainer__epochs=5, trainer__max_steps=8) as it:
        it.fit(build, data(), validation_data=data(8))
        assert (it.progress.epoch, it.progress.batch) == (1, 2)
    # In the cut epoch the metrics are still those of training, to continue with after a resume.
    assert judge.seen == [(True, False), (False, True)]


def test_a_stop_at_the_last_batch_cuts_nothing() -> None:
    judge = Judge()
    with trainer([judge], trainer__epochs=5, trainer__max_steps=12) as it:
        it.fit(build, data())
        assert (it.progress.epoch, it.progress.batch) == (2, 0)
    assert judge.seen == [(True, True)] * 2


def test_a_stop_at_the_last_batch_of_a_short_epoch_cuts_nothing() -> None:
    judge = Judge()
    with trainer([judge], trainer__epochs=9, trainer__max_steps=6) as it:
        it.fit(build, data(), steps_per_epoch=4)  # epochs of four batches and two
        assert (it.progress.epoch, it.progress.batch) == (2, 0)
    assert [complete for complete, _ in judge.seen] == [True, True]
    with trainer([judge], trainer__epochs=9, trainer__max_steps=5) as it:
        it.fit(build, data(), steps_per_epoch=4)
        assert (it.progress.epoch, it.progress.batch) == (1, 1)


def test_no_batches_is_an_error_in_whatever_epoch_is_first() -> None:
    def empty() -> Any:
        for _ in range(3):
            yield np.ones((0, 6), "float32"), np.ones(0)

    with trainer() as it, pytest.raises(DataError, match="no batches"):
        it.fit(build, empty(), initial_epoch=5, epochs=7)


def test_callbacks_see_verbose_as_given() -> None:
    seen: list[Any] = []

    class Params(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(self.params["verbose"])

    with trainer() as it:
        for given in ({"verbose": 0}, {"verbose": 2}, {}):
            it.fit(build, data(), callbacks=[Params()], **given)
    model = build()
    model.fit(*data(), callbacks=[Params()])
    assert seen == [0, 2, "auto", "auto"]


def test_max_time() -> None:
    seen, _, history = watch(trainer__epochs=1000, trainer__max_time="0.2s")
    assert 1 <= len(seen.steps) < 6000
    assert len(history["loss"]) < 1000


def test_each_fit_counts_its_own_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer() as it:
        kind = type(it.backend)
        monkeypatch.setattr(kind, "communication_seconds", property(lambda self: 100.0))
        it.fit(build, data())  # after what was waited for before
        assert it.state.times.seconds["communication"] == 0


def test_validate_every() -> None:
    seen, _, history = watch(data(8), trainer__epochs=4, trainer__validate_every="2ep")
    assert seen.validated == [12, 24]
    assert len(history["val_loss"]) == 2
    seen, _, history = watch(data(8), trainer__epochs=2, trainer__validate_every="4ba")
    assert seen.validated == seen.inside == [4, 8, 12]
    assert len(history["val_loss"]) == 1  # of the one that falls on an epoch's end
    seen, _, history = watch(data(8), trainer__validate_every="null")
    assert seen.validated == []
    assert list(history) == ["accuracy", "loss"]


def test_validation_inside_an_epoch_leaves_its_metrics_alone() -> None:
    _, plain = fit(trainer__epochs=2)
    _, _, history = watch(data(8), trainer__epochs=2, trainer__validate_every="4ba")
    assert {key: history[key] for key in plain} == plain


def test_logging_every() -> None:
    seen, _, _ = watch(trainer__epochs=2, logging__every="5ba")
    assert seen.logged == [5, 10]
    seen, _, _ = watch(trainer__epochs=2, logging__every="1ep")
    assert seen.logged == []


@pytest.mark.parametrize(("every", "due"), [("5ba", [15, 20]), ("0.75ep", [14, 18, 23])])
def test_intervals_do_not_count_epochs_before_the_first(
    every: str, due: list[int], tmp_path: Path
) -> None:
    seen = Watch()
    words = {"run__dir": tmp_path, "checkpoint__every": every, "checkpoint__keep": 9}
    with trainer([seen], logging__every=every, trainer__validate_every=every, **words) as it:
        it.fit(build, data(), initial_epoch=2, epochs=4, validation_data=data())
    saved = sorted(entry.step for entry in Store(tmp_path / "checkpoints").entries())
    assert (seen.logged, seen.inside, saved) == (due, due, due)


@pytest.mark.parametrize(
    ("settings", "steps", "tested"),
    [
        ({"trainer__limit_train_batches": 2}, 2, 4),
        ({"trainer__limit_train_batches": 0.5}, 3, 4),
        ({"trainer__limit_val_batches": 1}, 6, 1),
        ({"trainer__limit_val_batches": 0.5}, 6, 2),
        ({"trainer__limit_val_batches": 0}, 6, 0),
        ({"trainer__fast_dev_run": "true", "trainer__epochs": 9}, 1, 1),
        ({"trainer__fast_dev_run": 2, "trainer__validate_every": "null"}, 2, 2),
        ({"trainer__fast_dev_run": 2, "trainer__limit_val_batches": 0}, 2, 0),
    ],
    ids=str,
)
def test_limits(settings: dict[str, Any], steps: int, tested: int) -> None:
    seen, _, history = watch(data(16), **settings)
    assert (len(seen.steps), seen.tested) == (steps, tested)
    assert ("val_loss" in history) == (tested > 0)


def test_a_fast_dev_run_trains_whatever_its_first_epoch_is() -> None:
    with trainer(trainer__fast_dev_run=2) as it:
        history = it.fit(build, data(), initial_epoch=5, epochs=10, validation_data=data())
        assert (history.epoch, history.params["epochs"]) == ([5], 6)
        assert "val_loss" in history.history


def for_ever(x: Any, y: Any) -> Any:
    for start in itertools.cycle(range(0, len(x) - BATCH, BATCH)):
        yield x[start : start + BATCH], y[start : start + BATCH]


@pytest.mark.parametrize("given", [lambda *arrays: arrays, for_ever])
def test_overfit_batches_are_the_same_every_epoch(given: Any) -> None:
    x, y = data()
    ours, history = fit(
        given=given(x, y), trainer__overfit_batches=2, trainer__epochs=3, data__shuffle="true"
    )
    model = build()
    theirs = model.fit(
        x[: 2 * BATCH], y[: 2 * BATCH], BATCH, epochs=3, shuffle=False, verbose=0
    ).history
    assert history == theirs
    close(ours, model, 0)


def test_metrics_with_several_numbers_are_in_the_history() -> None:
    """As in Keras' own `fit`, whose History they are then compared with."""
    x = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
    y = keras.utils.to_categorical(np.arange(48) % 3)

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])
        made.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
        return made

    expected = model().fit(x, y, batch_size=32, shuffle=False, verbose=0).history
    with Trainer(overrides=["logging.progress=none", "data.shuffle=false"]) as trainer:
        found = trainer.fit(model, (x, y)).history
    assert set(found) == set(expected)
    np.testing.assert_allclose(found["f1"], expected["f1"], rtol=1e-6)


class CompilesAgain(keras.callbacks.Callback):
    """Trains slower from the second epoch on, as recipes for fine-tuning do."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.compile(keras.optimizers.SGD(0.001), "mse")
            self.model.make_train_function(force=True)


def test_a_model_that_a_callback_compiles_again_is_refused() -> None:
    with trainer([CompilesAgain()], trainer__epochs=3) as it:
        with pytest.raises(ModelError, match=r"a callback has called model\.compile"):
            it.fit(build(eager=False), data())
        assert it.progress.step == 6
