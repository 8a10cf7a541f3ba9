"""A hybrid training whose ranks die; `test_just_in_time_checkpoint.py` launches it.

    ktrainer run --heal --max-restarts 2 -n 4 hybrid_script.py RESULTS DATA 3:9:update,0:0:saving ..

DATA is `arrays`, or `loader`: a stand-in for a torch DataLoader that shuffles. Each start takes the
next word: who dies, after which step, and where. The start that has no word left trains to the end,
and then once more without a fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from ktrainer import Callback, Trainer
from ktrainer.backends.pipeline.runtime.stage_update import StageUpdate
from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.elastic import just_in_time_checkpoint
from ktrainer.steps.variable_placement import placement_of
from tests.data.test_torch_loader import Loader, Tensor, torch
from tests.distributed.collectives import wait_for_files

WORDS = (
    *("backend=pipeline", "backend.partitions=2", "backend.microbatches=3"),
    *("data.batch_size=25", "trainer.epochs=2", "trainer.clip.global_norm=0.5"),
    "logging.progress=none",
)
DISK = ("checkpoint.every=10ba", "checkpoint.asynchronous=false")


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6))
    return x, (x @ random.normal(size=(6, 3))).argmax(-1)


def build() -> keras.Model:
    """With seeds and statistics, that forward passes change before a step may fail."""
    keras.utils.clear_session()  # layers have the same names in both models
    keras.utils.set_random_seed(3)
    inner = [layers.Dense(8, "tanh"), layers.Dropout(0.1), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(8, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Dies(Callback):
    """Ends this process in the middle of things.

    Args:
        rank, step, where: who, by its rank at the start, after which step, and where: `schedule`
            is between microbatches, once all that die there have come, `update` once its own
            weights have changed, `saving` once it has written its part of the state, because
            others have died.
        marks: of all that die in the schedule, by rank: a file that says that it is there.
    """

    def __init__(self, marks: dict[str, Path], rank: str, step: str, where: str) -> None:
        super().__init__()
        self.rank, self.step, self.where = int(rank), int(step), where
        self.marks = marks
        self._received = 0  # tensors of other stages in this step

    def at(self, where: str) -> None:
        mine = where == self.where and self.world.stable_rank == self.rank
        if mine and self.progress.step >= self.step:
            if where == "schedule":
                self._meet()
            os.kill(os.getpid(), signal.SIGKILL)

    def _meet(self) -> None:
        """Wait for all that die here: the first loss would end the schedule of the others."""
        self.marks[str(self.rank)].touch()
        wait_for_files(*self.marks.values(), seconds=30)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        _after(Transport, "receive", self._count)
        _after(StageUpdate, "__call__", lambda: self.at("update"))
        _after(just_in_time_checkpoint, "write_stage_part", lambda: self.at("saving"))

    def on_step_begin(self, step: int) -> None:
        self._received = 0

    def _count(self) -> None:
        self._received += 1
        if self._received == 2:
            self.at("schedule")


def _after(home: Any, name: str, then: Callable[[], None]) -> None:
    """Let `then` happen after each call of a function of `home`."""
    original = getattr(home, name)

    def call(*args: Any) -> Any:
        found = original(*args)
        then()
        return found

    setattr(home, name, call)


def loader() -> Any:
    """The same batches as a loader of torch gives them, which shuffles with a generator."""
    sys.modules["torch"] = torch  # type: ignore[assignment]
    x, y = data()

    class Shuffled(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.dataset, self.generator = range(200), self.random

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Any]:
            order = self.random.random.permutation(200)
            for rows in order.reshape(8, 25):
                yield [Tensor(x[rows]), Tensor(y[rows])]

    return type("DataLoader", (Shuffled,), {"__module__": "torch.utils.data.dataloader"})()


def train(kind: str, run: str, callbacks: list[Any], *words: str) -> Any:
    """One `fit`: History, and the bits of the weights that this rank holds."""
    words = (*WORDS, f"run.dir={run}", *words)
    x, y = data()
    keeps_weights = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    with Trainer(overrides=words, callbacks=[keeps_weights, *callbacks]) as trainer:
        given = (x, y) if kind == "arrays" else loader()
        history = trainer.fit(build, given, validation_data=(x[:40], y[:40])).history
        placement = placement_of(trainer.model)
        held = [v.numpy().tobytes() for v in trainer.model.weights if placement.holds(v)]
    return history, held


def main() -> None:
    keras.config.set_floatx("float64")
    results, kind, *faults = sys.argv[1:]
    now = faults[int(os.environ["KTRAINER_RESTART"]) :][:1]
    words = [who.split(":") for word in now for who in word.split(",")]
    together = [rank for rank, _, where in words if where == "schedule"]
    start = os.environ["KTRAINER_RESTART"]
    marks = {rank: Path(results, f"at-schedule-{rank}-{start}") for rank in together}
    deaths = [Dies(marks, *word) for word in words]
    found = train(kind, f"{results}/run", deaths, *DISK)
    whole = train(kind, f"{results}/whole", [], "checkpoint.every=1ba", "checkpoint.keep=20")
    print(json.dumps([one == other for one, other in zip(found, whole, strict=True)]), flush=True)


if __name__ == "__main__":
    main()
