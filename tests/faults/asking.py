"""Runs that are asked to end by a real signal, and resume afterwards."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktrainer import Callback, Interrupted, Trainer
from ktrainer.checkpoint.format.checkpoint_store import Store
from tests.dist.harness import leaks
from tests.faults.runs import CASES, Case, Result, arrays, settings, train

BACKENDS = {
    "data_parallel": ("backend=data_parallel",),
    "pipeline": ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2"),
    "strategy": ("backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=2"),
    "workers": ("backend=tf_distribute", "backend.strategy=multi_worker_mirrored"),
}


class Asks(Callback):
    """Sends this process a signal at one moment, on one rank. What it does not see in `ended` has
    not been ended properly; `first` is the step that its first update followed."""

    def __init__(self, step: int, rank: int = 0, during: str = "step", number: int = 0) -> None:
        super().__init__()
        self.step, self.at_rank, self.during = step, rank, during
        self.number = number or signal.SIGTERM
        self.validated: list[int] = []
        self.ended = 0
        self.first: int | None = None

    def _ask(self, during: str) -> None:
        mine = self.world.rank == self.at_rank and during == self.during
        if mine and self.progress.step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._ask("begin")

    def on_step_begin(self, step: int) -> None:
        self.first = step if self.first is None else self.first

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self._ask("step")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ask("validation")

    def on_validation_end(self, step: int, logs: Any = None) -> None:
        self.validated.append(step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._ask("epoch end")

    def on_train_end(self, logs: Any = None) -> None:
        self.ended += 1


def case_of(name: str, asks: Asks) -> Case:
    case = CASES[name]
    return replace(case, callbacks=lambda: [*case.callbacks(), asks])


def whole(folder: Path, name: str, *words: str) -> tuple[Result, list[int]]:
    """A run that is not interrupted, and the steps of its validations inside epochs."""
    asks = Asks(-1)
    words = ("checkpoint.every=100ba", *words)
    return train(folder / "whole", case_of(name, asks), *words), asks.validated


def in_two(
    folder: Path, name: str, asks: Asks, *words: str
) -> tuple[Interrupted, Result, list[int]]:
    """A run that `asks` interrupts, and the rest of it; nothing else saves a checkpoint."""
    words = ("checkpoint.every=100ba", *words)
    here = folder / f"{asks.during} {asks.step}"
    try:
        train(here, case_of(name, asks), *words)
    except Interrupted as error:
        ended = error
    assert asks.ended == 1
    then = Asks(-1)
    result = train(here, case_of(name, then), *words)
    return ended, result, asks.validated + then.validated


def on_ranks(directory: str, name: str, rank: int, backend: str, *words: str) -> Any:
    """(what ended the first part, steps of its checkpoints, the rest and the whole run)."""
    words = (*BACKENDS[backend], *words)
    expected, _ = whole(Path(directory), name, *words)
    ended, found, _ = in_two(Path(directory), name, Asks(3, rank), *words)
    if backend == "workers":
        leaks.expect_ports()
    store = Store(Path(directory) / "step 3" / "checkpoints")
    return ended, sorted(entry.step for entry in store.entries()), found, expected


def no_checkpoint(folder: Path) -> Interrupted | None:
    """The end of a run in which checkpointing is off."""
    words = [w for w in settings(folder, CASES["compiled"]) if not w.startswith("checkpoint.")]
    with Trainer(overrides=words, callbacks=[Asks(2)]) as trainer:
        try:
            trainer.fit(CASES["compiled"].model, arrays(8))
        except Interrupted as error:
            return error
    return None
