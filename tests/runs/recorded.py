"""Small runs that keep a record of each step; a script of its own, to be killed.

python tests/runs/recorded.py FOLDER STEP [WORD ...]    kills itself before update STEP

Of several ranks the last one does, in the first start alone. Later ones wait while there is a
file FOLDER.hold.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ktrainer import Callback, Trainer
from ktrainer.distributed import restart_records
from tests.small import BATCH, build, data

EPOCHS, STEPS = 3, 6  # an epoch
WORDS = (
    f"data.batch_size={BATCH}",
    f"trainer.epochs={EPOCHS}",
    "trainer.validate_every=4ba",
    "logging.every=1ba",
    "logging.progress=none",
    "checkpoint.every=5ba",
    "checkpoint.asynchronous=false",
    "seed=3",
)


class Acts(Callback):
    """Calls `act` once, before an update."""

    def __init__(self, step: int, act: Any) -> None:
        super().__init__()
        self.step, self.act = step, act

    def on_step_begin(self, step: int) -> None:
        if step == self.step:
            self.step = -1
            self.act()


class Logged(Callback):
    """Keeps what the loop reports: `{(event, step): logs}`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, int], dict[str, float]] = {}

    def on_log(self, step: int, logs: Any) -> None:
        self.rows["log", step] = dict(logs)

    def on_validation_end(self, step: int, logs: Any) -> None:
        self.rows["validation", step] = dict(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.rows["epoch", self.progress.step] = dict(logs)


def train(folder: Path, *words: str, callbacks: Any = (), rows: Any = None) -> dict[str, Any]:
    """A `fit`; its History."""
    words = (f"run.dir={folder}", *WORDS, *words)
    with Trainer(overrides=words, callbacks=callbacks) as trainer:
        return trainer.fit(build, rows or data(), validation_data=data(8, seed=1)).history


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillsLastRank(Acts):
    most = 0  # ranks that there were

    def on_step_begin(self, step: int) -> None:
        self.most = max(self.most, self.world.size)
        if self.world.rank == self.most - 1 and restart_records.count() == 0:
            super().on_step_begin(step)


if __name__ == "__main__":
    until = time.monotonic() + 150
    while restart_records.count() and Path(f"{sys.argv[1]}.hold").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    train(Path(sys.argv[1]), *sys.argv[3:], callbacks=[KillsLastRank(int(sys.argv[2]), kill)])
