"""One suite that every callback of ours passes: alone under Keras, and under the Trainer.

Constructed, fitted twice, closed twice, resumed through its state; it changes neither the
weights nor the History of a training that needs nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktrainer.callbacks as callbacks
from ktrainer import Trainer
from ktrainer.callbacks import Callback
from ktrainer.callbacks.base import EXTRA_EVENTS
from ktrainer.checkpoint.format.value_encoding import decode_json, encode_json
from tests.callbacks.helpers import data, everything, fit, small_model

MAKERS: dict[str, Callable[[Path], Any]] = {
    "Audit": lambda path: callbacks.Audit(every="2ba"),
    "AverageMetrics": lambda path: callbacks.AverageMetrics(),
    "BroadcastVariables": lambda path: callbacks.BroadcastVariables(),
    "CSVLog": lambda path: callbacks.CSVLog(path / "log.csv", every="2ba"),
    "Checkpoint": lambda path: callbacks.Checkpoint(path / "c", every="1ep", best="loss"),
    "LearningRate": lambda path: callbacks.LearningRate(schedule=[]),
    "LearningRate, active": lambda path: callbacks.LearningRate(
        schedule=[{"start": "0ba", "multiplier": 1.0}]
    ),
    "LossGuard": lambda path: callbacks.LossGuard(),
    "LossGuard, spikes": lambda path: callbacks.LossGuard(spike=100.0, window=2),
    "LossGuard, skipping": lambda path: callbacks.LossGuard("skip", 100.0, "skip", window=2),
    "PlainProgress": lambda path: callbacks.PlainProgress(every="2ba"),
    "RichProgress": lambda path: callbacks.RichProgress(),
    "TensorBoardLog": lambda path: callbacks.TensorBoardLog(path / "tb", every="2ba"),
    "Throughput": lambda path: callbacks.Throughput(),
}


@pytest.fixture(params=sorted(MAKERS))
def make(request, tmp_path) -> Callable[[], Any]:
    """Makes the callback under test."""
    return lambda: MAKERS[request.param](tmp_path)


def test_no_callback_is_left_out() -> None:
    public = {
        name
        for name in callbacks.__all__
        if isinstance(value := getattr(callbacks, name), type) and issubclass(value, Callback)
    }
    assert public - {"Callback"} == {name.split(",")[0] for name in MAKERS}


@pytest.fixture(scope="module")
def plain() -> tuple[list[np.ndarray], dict[str, list[float]], dict[str, list[float]]]:
    """Variables and both Histories of two fits without callbacks."""
    model = small_model()
    x, y = data(20)
    first = fit(model, [], epochs=2, validation_data=(x, y)).history
    second = fit(model, [], epochs=2, validation_data=(x, y)).history
    return everything(model), first, second


@pytest.mark.quick("RichProgress")
def test_alone_under_keras_fit_twice_and_close_twice(make, plain) -> None:
    model, callback = small_model(), make()
    x, y = data(20)
    histories = [fit(model, [callback], epochs=2, validation_data=(x, y)).history for _ in range(2)]
    model.evaluate(x, y, verbose=0, callbacks=[callback])
    model.predict(x, verbose=0, callbacks=[callback])
    callback.close()
    callback.close()
    assert histories == list(plain[1:])
    for ours, expected in zip(everything(model), plain[0], strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.quick("BroadcastVariables")
def test_closed_before_and_in_the_middle(make) -> None:
    callback = make()
    callback.close()

    class Interrupts(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(small_model(), [callback, Interrupts()])
    callback.close()
    fit(small_model(), [callback])  # and is as good as new
    callback.close()


@pytest.mark.quick("LossGuard, spikes")
def test_state_goes_through_json_and_back(make) -> None:
    first, second = make(), make()
    fit(small_model(), [first], epochs=2)
    state = decode_json(encode_json(first.state_dict()))
    json.dumps(state)

    class Resumes(Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            super().on_train_begin(logs)
            second.load_state_dict(state)
            second.on_restore(first.progress)

    fit(small_model(), [second, Resumes()], epochs=3, initial_epoch=2)
    assert decode_json(encode_json(second.state_dict())).keys() == state.keys()
    for callback in (first, second):
        callback.close()


@pytest.mark.quick("Checkpoint")
def test_under_the_trainer_twice(make, tmp_path, plain) -> None:
    callback = make()
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "trainer": {"epochs": 2},
        "data": {"batch_size": 10, "shuffle": False},
        "checkpoint": {"resume": "never"},
        "logging": {"every": "2ba", "progress": "none", "csv": False},
    }
    model = small_model(run_eagerly=False)
    with Trainer(config) as trainer:
        histories = [
            trainer.fit(model, data(50), validation_data=data(20), callbacks=[callback]).history
            for _ in range(2)
        ]
    callback.close()
    for history, expected in zip(histories, plain[1:], strict=True):
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)


def test_extra_events_exist_and_do_nothing() -> None:
    callback = Callback()
    assert all(callable(getattr(callback, event)) for event in EXTRA_EVENTS)
    assert callback.on_gradients([1, 2], []) == [1, 2]
    assert callback.state_dict() == {}
    callback.load_state_dict({})
    callback.close()
