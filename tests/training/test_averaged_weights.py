"""Keras' SwapEMAWeights where training goes back, resumes, or ends before its last epoch."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Callback
from tests.small import BATCH, build, close, data, trainer

EPOCHS = 3  # of six updates


def averaging() -> keras.Model:
    return build(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))


def train(*callbacks: Any, model: Any = averaging, validation: Any = None, **settings: Any) -> Any:
    """The bits of all variables, and the history, after a `fit` as in a new process."""
    keras.utils.clear_session()
    with trainer(callbacks, **{"trainer__epochs": EPOCHS, **settings}) as it:
        history = it.fit(model, data(), validation_data=validation).history
        variables = [*it.model.variables, *it.model.optimizer.variables]
        return [v.numpy().tobytes() for v in variables], history, it


def swap(on_epoch: bool = True) -> keras.callbacks.Callback:
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)


class GoesBack(Callback):
    """Asks for a rollback once, inside the second epoch, and keeps the weights that follow."""

    restored: Sequence[np.ndarray] = ()

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if step == 8 and not self.restored:
            self.trainer.request_rollback("of a test")

    def on_restore(self, progress: Any) -> None:
        self.restored = self.model.get_weights()


@pytest.mark.filterwarnings("ignore:of a test. back to the checkpoint of step 6")
def test_a_rollback_to_the_end_of_an_epoch_continues_with_the_trained_weights(
    tmp_path: Path,
) -> None:
    """Without a validation and `swap_on_epoch` nothing swaps, and training is the same."""
    found, backs = [], [GoesBack(), GoesBack()]
    for on_epoch, back in zip((True, False), backs, strict=True):
        words = {"run__dir": tmp_path / str(on_epoch), "checkpoint__every": "1ep"}
        found.append(train(swap(on_epoch), back, **words)[2])
    close(*found, 1e-5)
    for ours, theirs in zip(*(back.restored for back in backs), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


class Asks(keras.callbacks.Callback):
    """Asks the run to end in a validation, counted from 1."""

    def __init__(self, validation: int) -> None:
        super().__init__()
        self.left = validation

    def on_test_begin(self, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("every", "on_epoch"), [("1ep", True), ("4ba", True), ("1ep", False), ("4ba", False)]
)
def test_a_run_that_ends_in_a_validation_resumes_to_the_bit(
    tmp_path: Path, every: str, on_epoch: bool
) -> None:
    words = {"trainer__validate_every": every, "validation": data(8), "checkpoint__every": "1ep"}
    words["checkpoint__resume"] = "auto"
    whole = train(swap(on_epoch), run__dir=tmp_path / "whole", **words)
    with pytest.raises(SystemExit):
        train(swap(on_epoch), Asks(2), run__dir=tmp_path / "parts", **words)
    assert train(swap(on_epoch), run__dir=tmp_path / "parts", **words)[:2] == whole[:2]


@pytest.mark.parametrize("every", ["1ep", "4ba"])
def test_an_interrupted_validation_may_be_left_out(tmp_path: Path, every: str) -> None:
    words = {"run__dir": tmp_path, "checkpoint__every": "1ep", "checkpoint__resume": "auto"}
    with pytest.raises(SystemExit):
        train(swap(False), Asks(2), trainer__validate_every=every, validation=data(8), **words)
    _, history, it = train(swap(False), **words)
    assert "val_loss" not in history or len(history["val_loss"]) < EPOCHS
    close(it, train(swap(False))[2], 1e-5)


def test_an_interrupted_validation_may_be_due_later(tmp_path: Path) -> None:
    """Training continues with the trained weights."""
    words = {"validation": data(8), "checkpoint__every": "1ep", "checkpoint__resume": "auto"}
    with pytest.raises(SystemExit):
        train(swap(False), Asks(2), trainer__validate_every="1ep", run__dir=tmp_path, **words)
    words["trainer__validate_every"] = "3ep"
    _, history, it = train(swap(False), run__dir=tmp_path, **words)
    assert len(history["val_loss"]) == 2  # of the first epoch, and of the last
    close(it, train(swap(False), **words)[2], 1e-5)


def fitted(epochs: int, *callbacks: Any) -> keras.Model:
    """The model that Keras' own `fit` trains."""
    keras.utils.clear_session()
    model, (x, y) = averaging(), data()
    model.fit(x, y, BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def test_max_steps_ends_with_the_averages_as_the_last_epoch_does(tmp_path: Path) -> None:
    words = {"run__dir": tmp_path, "checkpoint__every": "1ep", "checkpoint__resume": "auto"}
    for _ in range(2):  # the second time there is nothing left to train
        _, _, it = train(swap(), trainer__max_steps=12, **words)
        close(it, fitted(2, swap()), 0)
    # Training continues with the weights that were trained.
    assert train(swap(), **words)[0] == train(swap())[0]
    cut, plain = (train(*given, trainer__max_steps=8)[2] for given in ([swap()], []))
    close(cut, plain, 1e-6)


class TimeIsUp(Callback):
    """Has the clock pass an hour, after four updates."""

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if step == 4:
            self.progress.elapsed += 3601


def test_the_clock_and_the_end_of_a_generator_end_with_the_averages() -> None:
    late = TimeIsUp()
    timed, plain = (train(*c, trainer__max_time="1h")[2] for c in ([swap(), late], [late]))
    assert timed.progress.step == plain.progress.step == 4
    close(timed, plain, 1e-6)
    x, y = data()
    batches = ((x[i : i + BATCH], y[i : i + BATCH]) for i in [*range(0, len(x), BATCH)] * 2)
    with trainer([swap()], trainer__epochs=9) as it:
        with pytest.warns(UserWarning, match="ran out of data in epoch 3, before its 6 batches"):
            it.fit(averaging, batches, steps_per_epoch=6)
        close(it, fitted(2, swap()), 0)


def stops(restores: bool = False) -> keras.callbacks.Callback:
    """Stops after two epochs: the loss only falls, and the first one counts as the best."""
    return keras.callbacks.EarlyStopping("loss", 0, 1, 0, "max", restore_best_weights=restores)


@pytest.mark.quick("swapped", "best weights")
@pytest.mark.parametrize(
    ("callbacks", "averaged_after"),
    [
        (lambda: [swap(), stops()], None),
        (lambda: [swap(False), stops()], 2),
        (lambda: [swap(), stops(restores=True)], 1),
    ],
    ids=["swapped", "not swapped", "best weights"],
)
def test_the_stop_of_a_callback_ends_as_under_keras(
    callbacks: Any, averaged_after: int | None
) -> None:
    """With the trained weights where epochs end swapped, unless the best ones are restored."""
    _, history, it = train(*callbacks())
    assert len(history["loss"]) == 2
    close(it, fitted(EPOCHS, *callbacks()), 0)
    averages = fitted(averaged_after or 2)
    with nullcontext() if averaged_after else pytest.raises(AssertionError):
        close(it, averages, 1e-6)


@pytest.mark.parametrize("on_epoch", [False, True])
def test_a_predict_with_the_callback_before_a_fit_changes_it_as_under_keras(on_epoch: bool) -> None:
    """It leaves the averages in the model."""
    ours, theirs, (x, y) = swap(on_epoch), swap(on_epoch), data()
    model = fitted(2, theirs)
    model.predict(x, BATCH, verbose=0, callbacks=[theirs])
    model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[theirs])
    keras.utils.clear_session()
    with trainer(trainer__epochs=2) as it:
        own = averaging()
        it.fit(own, (x, y), callbacks=[ours])
        it.predict(own, x, callbacks=[ours])
        it.fit(own, (x, y), callbacks=[ours])
    close(own, model, 0)
