"""Examples per second, and waiting times of each rank.

Events used: `on_epoch_begin` (start the clock), `on_epoch_end` (gather from all ranks),
`on_restore` (drop the lines of epochs that will be repeated or completed).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktrainer.callbacks.base import Callback
from ktrainer.distributed import World
from ktrainer.state.progress import Progress
from ktrainer.state.time_shares import communication_of


@dataclass(frozen=True)
class EpochSpeed:
    """Speed of one epoch.

    Attributes:
        epoch: its number, from 0.
        seconds: from its beginning to its end on rank 0, validation included.
        steps: updates made in it, also those that a rollback has undone.
        examples: examples in it over all ranks; None when not counted (plain Keras).
        examples_per_second: over all ranks.
        data_wait, communication_wait: seconds that each rank waited for data, and for other
            ranks, but for the first update of a `fit`; empty when not measured.
    """

    epoch: int
    seconds: float
    steps: int
    examples: int | None
    examples_per_second: float | None
    data_wait: list[float]
    communication_wait: list[float]


Rates = tuple[float | None, ...]  # steps and examples per second


class Meter:
    """Steps and examples per second, and the wait for data, over the last few seconds.

    Counts the updates of the present epoch: a rollback makes `progress.step` smaller.
    """

    WINDOW = 5.0  # seconds

    def __init__(self) -> None:
        self._marks: list[tuple[float, int, int, float]] = []
        self._last: Rates = (None, None)  # shown while there is nothing newer
        self._epoch: tuple[int, int] = (0, 0)

    def reset(self, progress: Progress, waited: float = 0.0) -> None:
        """Restart the window, to leave validation and compilation out of the rates.

        Args:
            waited: seconds that this rank has waited for data so far.
        """
        self._last = self.rates
        self._epoch = (progress.batch, progress.examples)
        self._marks = [(time.perf_counter(), progress.batch, progress.examples, waited)]

    def update(self, progress: Progress, waited: float = 0.0) -> None:
        """Read the clock after a step."""
        now = time.perf_counter()
        self._marks.append((now, progress.batch, progress.examples, waited))
        while len(self._marks) > 2 and now - self._marks[1][0] > self.WINDOW:
            self._marks.pop(0)

    @property
    def data_wait(self) -> tuple[float, float] | None:
        """Seconds that a step waits for data, and the share of the time; None when unknown."""
        if len(self._marks) < 2:
            return None
        (t0, s0, _, w0), (t1, s1, _, w1) = self._marks[0], self._marks[-1]
        return (w1 - w0) / max(1, s1 - s0), (w1 - w0) / max(t1 - t0, 1e-9)

    @property
    def rates(self) -> Rates:
        """(steps, examples) per second; None when unknown."""
        if len(self._marks) < 2:
            return self._last
        (t0, s0, e0, _), (t1, s1, e1, _) = self._marks[0], self._marks[-1]
        seconds = max(t1 - t0, 1e-9)
        return (s1 - s0) / seconds, ((e1 - e0) / seconds if e1 > e0 else None)

    @property
    def steps_per_second(self) -> float | None:
        return self.rates[0]

    def of_epoch(self, progress: Progress, seconds: float) -> Rates:
        """(steps, examples) per second since `reset`."""
        steps, examples = progress.batch - self._epoch[0], progress.examples - self._epoch[1]
        seconds = max(seconds, 1e-9)
        return steps / seconds, (examples / seconds if examples else None)


class Throughput(Callback):
    """Measure examples per second, and each rank's waits, epoch by epoch.

    Args:
        write: with a trainer, write each epoch's figures to `throughput.jsonl` in the run's folder
            (`throughput-2.jsonl` for a second `fit`). A resumed epoch has the figures of its part
            after the resume.
        world: the ranks; default: the trainer's, or this process's.

    Attributes:
        epochs: an `EpochSpeed` per epoch, the same on every rank.
    """

    def __init__(self, write: bool = True, world: World | None = None) -> None:
        super().__init__()
        self.write = write
        self._own_world = world
        self.epochs: list[EpochSpeed] = []
        self._start = self._now()
        self._kept = False  # the file holds lines of this fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.epochs = []
        self._kept = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._start = self._now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        end = self._now()
        super().on_epoch_end(epoch, logs)
        spent = {key: end[key] - self._start.get(key, 0.0) for key in end}
        every = self.world.allgather(spent, "throughput of an epoch")
        seconds = every[0]["seconds"]
        examples = int(every[0]["examples"]) if self.trainer is not None else None
        speed = EpochSpeed(
            epoch=epoch,
            seconds=seconds,
            steps=int(every[0]["steps"]),
            examples=examples,
            examples_per_second=examples / seconds if examples and seconds else None,
            data_wait=[rank["data"] for rank in every if "data" in rank],
            communication_wait=[rank["communication"] for rank in every if "communication" in rank],
        )
        self.epochs.append(speed)
        path = self._path()
        if path is not None:
            with open(path, "a" if self._kept else "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(speed)) + "\n")
            self._kept = True

    def on_restore(self, progress: Progress) -> None:
        path = self._path()
        if path is None or not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        temporary = path.with_name(f".{path.name}.tmp")
        kept = [line for line in lines if _epoch(line) < progress.epoch]
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._kept = True

    def _path(self) -> Path | None:
        """The file, on the rank that writes."""
        wanted = self.write and self.run_dir is not None and self.world.is_root
        return self.run_path("throughput.jsonl") if wanted else None

    def _now(self) -> dict[str, float]:
        progress = self.progress
        now = {
            "seconds": time.perf_counter(),
            "steps": progress.batch,
            "examples": progress.examples,
        }
        if self.trainer is None:
            return now
        times = self.train_state.times.read()
        now["data"] = times.get("data", 0.0)
        if self.trainer.backend.communication_seconds is not None:
            now["communication"] = communication_of(times)
        return now


def _epoch(line: str) -> float:
    """The epoch of a line; infinity for a truncated one."""
    try:
        return float(json.loads(line)["epoch"])
    except (KeyError, TypeError, ValueError):
        return float("inf")
