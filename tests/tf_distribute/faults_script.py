"""What the coordinator of a cluster goes through in `test_servers`, when others die or stop.

`ktrainer run --workers 2 --servers 1 faults_script.py FOLDER` writes what it found to
FOLDER/found.json, and then ends with an error. The coordinator sends the signals itself, for some
must come between what a worker computes and what is copied from there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ktrainer import Callback, PeerLost, Trainer

# isort: split
import keras
import numpy as np
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl

from tests.tf_distribute.launching import QUIET, SERVERS

FOLDER = Path(sys.argv[1])
ROWS, BATCH = 960, 16


def main() -> None:
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    pid_file(own["type"], own["index"]).write_text(str(os.getpid()))
    found = {
        "rolled back": rolled_back(),
        "killed": killed_after_its_update(),
        "stopped": stopped_before_the_copy(),
        "server": stopped_server(),
    }
    (FOLDER / "found.json").write_text(json.dumps(found))
    stopped_server_that_is_asked()


def rolled_back() -> dict[str, Any]:
    """Back to the checkpoint of step 8 while workers still compute later updates."""

    class Back(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 13 and not seen:
                self.trainer.request_rollback("of a test")

        def on_restore(self, progress: Any) -> None:
            seen.append(self.trainer.state.program.finish())

    seen: list[Any] = []
    words = ("checkpoint.every=8ba", f"checkpoint.dir={FOLDER / 'back'}")
    with trainer(*words) as it, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        it.fit(slow, data(), callbacks=[Back()])
        (loss,) = (m for m in it.model.metrics if m.name == "loss")
        return {
            "running": len([logs for logs in seen if logs is not None]),
            "said": [str(each.message) for each in said if "of a test" in str(each.message)],
            "steps": it.progress.step,
            "applied": int(it.model.optimizer.iterations.numpy()),
            "counted": float(loss.variables[-1].numpy()),
        }


def killed_after_its_update() -> dict[str, Any]:
    """Worker 1 is killed after it has applied an update, before that is known."""
    with trainer() as it, before_a_copy(1) as sent:
        sent.number = signal.SIGKILL
        it.fit(build, data())
        counted = {m.name: float(m.variables[-1].numpy()) for m in it.model.metrics}
        return {
            "sent": sent.count,
            "steps": it.progress.step,
            "applied": int(it.model.optimizer.iterations.numpy()),
            "counted": counted["loss"],
        }


def stopped_before_the_copy() -> Any:
    """The worker that has been started in its place stops when it has computed a step."""
    with trainer("trainer.epochs=1000", "trainer.max_time=1m") as it:
        while it.backend._liveness.missing():
            time.sleep(0.2)
        with before_a_copy(1) as stop:
            said = said_by(lambda: it.fit(build, data()), stop)
    stop.undo()
    return said


def stopped_server() -> Any:
    """Inside of `with`: the weights stay where they are."""
    stop = Stop("ps", 0)
    with trainer("trainer.epochs=1000", "trainer.max_time=1m") as it:
        said = said_by(lambda: it.fit(build, data(), callbacks=[At(4, stop)]), stop)
    stop.undo()
    return said


def stopped_server_that_is_asked() -> None:
    """By a callback, for the learning rate: TensorFlow would wait for ever."""
    with trainer("trainer.epochs=1000") as it:
        ask = [At(4, Stop("ps", 0)), At(5, lambda: float(it.model.optimizer.learning_rate))]
        it.fit(build, data(), callbacks=ask)


def pid_file(job: str, index: int) -> Path:
    """Where a task writes its process id."""
    return FOLDER / f"{job}-{index}.pid"


class Stop:
    """Sends a signal to a task, once."""

    def __init__(self, job: str, index: int) -> None:
        self.job, self.index, self.number, self.at = job, index, signal.SIGSTOP, 0.0
        self.count = 0

    def __call__(self) -> None:
        if self.count == 0:
            self.count, self.at = 1, time.monotonic()
            self._send(self.number)

    def undo(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        os.kill(int(pid_file(self.job, self.index).read_text()), number)


class At(keras.callbacks.Callback):
    """Does something after a batch."""

    def __init__(self, batch: int, what: Callable[[], Any]) -> None:
        super().__init__()
        self.batch, self.what = batch, what

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            self.what()


@contextmanager
def before_a_copy(worker: int) -> Iterator[Stop]:
    """A signal to a worker, before what it has first computed is copied from there."""
    sent = Stop("worker", worker)
    original = RemoteValueImpl._copy_to_local

    def copy(self: Any) -> Any:
        if f"/job:worker/replica:0/task:{worker}/" in " ".join(devices(self._values)):
            sent()
        return original(self)

    with patch.object(RemoteValueImpl, "_copy_to_local", copy):
        yield sent


def devices(values: Any) -> list[str]:
    return [value.backing_device for value in keras.tree.flatten(values)]


def said_by(act: Callable[[], Any], sent: Stop) -> Any:
    """What PeerLost says, and after how many seconds."""
    try:
        act()
    except PeerLost as error:
        seconds = time.monotonic() - sent.at
        return re.sub(r"\d{4,}", "N", str(error)), seconds
    return "nothing", 0.0


def trainer(*words: str) -> Trainer:
    batch = f"data.batch_size={BATCH}"
    return Trainer({"logging": {"progress": "none"}}, overrides=[*SERVERS, *QUIET, batch, *words])


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def slow() -> keras.Model:
    """Its updates take a moment, so that some are under way when a callback acts."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(800)(inputs)
    for _ in range(30):
        hidden = keras.layers.Dense(800, trainable=False)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return x, x[:, :3]


if __name__ == "__main__":
    main()
