"""A run with all trackers that are installed; a script of its own, to be killed.

python tests/trackers/tracked.py FOLDER SECONDS [WORD ...]        kills itself SECONDS after its
                                                                  first update begins; 0: never
python tests/trackers/tracked.py FOLDER begin+SECONDS [WORD ...]  SECONDS after `on_train_begin`,
                                                                  by when no start may be recorded
python tests/trackers/tracked.py FOLDER rank0 [WORD ...]          rank 0, before update 8
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
    """Takes its time, and kills the process after some: since its first update, or the begin."""

    def __init__(self, seconds: float, early: bool = False) -> None:
        super().__init__()
        self.seconds, self.early = seconds, early
        self.timer: threading.Timer | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if self.early:
            self.start()

    def on_step_begin(self, step: int) -> None:
        if self.seconds:
            self.start()
            time.sleep(0.03)

    def start(self) -> None:
        if self.timer is None:
            self.timer = threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL))
            self.timer.daemon = True
            self.timer.start()


class FirstRankFails(Callback):
    """Kills rank 0 before update 8, of all ranks that there were."""

    def on_step_begin(self, step: int) -> None:
        if step == 7 and self.world.rank == 0 and self.world.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def callback(what: str) -> Callback:
    if what == "rank0":
        return FirstRankFails()
    return Slowly(float(what.removeprefix("begin+")), what.startswith("begin+"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = [f"run.dir={folder}", *WORDS, *words(folder), *sys.argv[3:]]
    with Trainer.from_cli([callback(sys.argv[2])], settings) as trainer:
        trainer.fit(build, data(), validation_data=data(8, seed=1))
