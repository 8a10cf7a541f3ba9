"""A run with all trackers that are installed; a script of its own, to be killed.

python tests/trackers/tracked.py FOLDER SECONDS [WORD ...]    kills itself after SECONDS of training
python tests/trackers/tracked.py FOLDER rank0 [WORD ...]      rank 0 kills itself before update 8
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktrainer import Callback, Trainer
from tests.runs.recorded import WORDS
from tests.small import build, data

PROJECT = "digits"
TRACKERS = {
    "wandb": "{project: digits, mode: offline}",
    "mlflow": "{experiment: digits, tracking_uri: 'sqlite:///%s/mlflow.db'}",
    "trackio": "{project: digits}",
}


def words(folder: Path) -> list[str]:
    """Settings of all loggers; the stores of trackers are beside the run's folder."""
    found = [name for name in TRACKERS if find_spec(name) is not None]
    stores = {name: TRACKERS[name].replace("%s", str(folder.parent)) for name in found}
    files = ["logging.tensorboard=true", "logging.csv=true"]
    return [*files, *(f"logging.{name}={store}" for name, store in stores.items())]


class Slowly(Callback):
    """Takes its time, and kills the process after some."""

    def __init__(self, seconds: float, step: float) -> None:
        super().__init__()
        self.seconds, self.step = seconds, step

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if self.seconds:
            timer = threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def on_step_begin(self, step: int) -> None:
        time.sleep(self.step)


class FirstRankFails(Callback):
    """Kills rank 0 before update 8, of all ranks that there were."""

    def on_step_begin(self, step: int) -> None:
        if step == 7 and self.world.rank == 0 and self.world.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def callback(what: str) -> Callback:
    if what == "rank0":
        return FirstRankFails()
    return Slowly(float(what), 0.03 if float(what) else 0.0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = [f"run.dir={folder}", *WORDS, *words(folder), *sys.argv[3:]]
    with Trainer.from_cli([callback(sys.argv[2])], settings) as trainer:
        trainer.fit(build, data(), validation_data=data(8, seed=1))
