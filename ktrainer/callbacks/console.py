"""Progress display on rank 0.

Events used: `on_train_begin`, `on_epoch_begin`, `on_step_end` (the bar), `on_log` (metrics),
`on_test_begin`, `on_test_batch_end`, `on_test_end`, `on_validation_end`, `on_epoch_end`,
`on_restore` and `on_heal` (epochs and time before), `on_slow`, `on_train_end` (the summary),
`close`.

    RichProgress    a live bar on a terminal, a line per epoch above it
    PlainProgress   a line every `logging.every` and one per epoch, for logs

Both end with a small table: see `console_text.final_report`.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktrainer.callbacks.console_text import (
    epochs_of,
    final_report,
    headline,
    metrics_text,
    rate_text,
    span_text,
    summary,
)
from ktrainer.callbacks.reporter import Reporter
from ktrainer.callbacks.throughput import Meter, Throughput
from ktrainer.distributed import World
from ktrainer.state.durations import Duration
from ktrainer.state.nested_logs import as_floats
from ktrainer.state.progress import Progress
from ktrainer.state.slowness import Slow

SHOWN_WAIT = 0.1  # share of the time from which on a wait for data is shown
REFRESH_SECONDS = 0.1  # redrawing more often slows the steps, and is too fast to read


class _Progress(Reporter):
    """State of both displays.

    Attributes:
        throughput: a `Throughput` callback, whose figures the summary shows; None for none.
        newest: gives the run's newest checkpoint on the disk, for the summary; None: there is none.
    """

    def __init__(self, every: str | Duration = "50ba", world: World | None = None) -> None:
        super().__init__(every, world)
        self.meter = Meter()
        self.throughput: Throughput | None = None
        self.newest: Callable[[], Path | None] = lambda: None
        self._epochs: dict[int, dict[str, float]] = {}
        self._judged = True  # each epoch's loss of validation is known
        self._changes_before = self._first_step = 0
        self._resumed = self._began = False  # whether an epoch has begun here
        self._began_at = self._epoch_began = time.perf_counter()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._epochs, self._judged = {}, True
        self._resumed = self._began = False
        self._began_at = time.perf_counter()
        self._first_step = 0
        self._changes_before = len(self.train_state.healed)  # in earlier fits
        self.meter.reset(self.progress, self.waited)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._began = True
        self._epoch_began = time.perf_counter()
        self.meter.reset(self.progress, self.waited)
        if not self.progress.examples:  # none before this epoch: skipped ones were not trained
            self._first_step = self.progress.step

    def on_restore(self, progress: Progress) -> None:
        """Have the summary tell of what was before a resume, too."""
        self._resumed = self._resumed or not self._began  # else it is a rollback
        self._take_over(progress)

    def on_heal(self, progress: Progress) -> None:
        self._take_over(progress)

    def _take_over(self, progress: Progress) -> None:
        """Continue the time and the epochs of others: of an earlier start, or a lost first rank."""
        if not self._began:
            self._began_at = time.perf_counter() - progress.elapsed
        if not self._epochs:
            self._epochs, self._judged = epochs_of(self.model.history)

    @property
    def epochs(self) -> int | None:
        """Epochs to run in all."""
        return (self.params or {}).get("epochs")

    def position(self, epoch: int | None = None) -> str:
        """`epoch 2/5`."""
        number = (self.progress.epoch if epoch is None else epoch) + 1
        return f"epoch {number}/{self.epochs}" if self.epochs else f"epoch {number}"

    def eta(self) -> float | None:
        """Estimated seconds of training left; None when unknown."""
        steps, epochs, speed = self.steps_per_epoch, self.epochs, self.meter.steps_per_second
        if not (steps and epochs and speed):
            return None
        progress = self.progress
        left = (epochs - progress.epoch) * steps - progress.batch
        limit = getattr(getattr(self.trainer, "config", None), "trainer", None)
        if limit is not None and limit.max_steps:
            left = min(left, limit.max_steps - progress.step)
        return max(left, 0) / speed

    def epoch_line(self, epoch: int, logs: Mapping[str, float]) -> str:
        seconds = time.perf_counter() - self._epoch_began
        speed = rate_text(self.meter.of_epoch(self.progress, seconds))
        return f"{self.position(epoch)}  {metrics_text(logs)}  [{span_text(seconds)}, {speed}]"

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for data so far."""
        return self.train_state.times.seconds.get("data", 0.0)

    def wait_text(self) -> str:
        """`  data wait 3.1 ms/step (24%)`, of this rank, where that is worth showing."""
        wait = self.meter.data_wait
        if wait is None or wait[1] < SHOWN_WAIT:
            return ""
        return f"  data wait {wait[0] * 1e3:.3g} ms/step ({wait[1]:.0%})"

    def final_report(self) -> str:
        """The text at the end of training."""
        seconds = time.perf_counter() - self._began_at
        speeds = self.throughput.epochs if self.throughput is not None else []
        facts = summary(
            self.progress, seconds, speeds, self.world.size, self._first_step, self._resumed
        )
        state = self.train_state
        said = final_report(
            facts | self._files(),
            self._epochs,
            state.end.get("why"),
            self._stood_out(),
            self._judged,
        )
        return f"{said}\n\n  stopped because {state.stop_reason}" if state.stop_reason else said

    def _files(self) -> dict[str, str]:
        """The folders of the run and its newest checkpoint, and how to resume."""
        if self.trainer is None or self.trainer.config.trainer.fast_dev_run:
            return {}
        report = f"ktrainer report {shlex.quote(str(self.run_dir))}"
        facts = {"run": str(self.run_dir), "report": report}
        if (newest := self.newest()) is not None:
            more = "" if self.train_state.end else "more trainer.epochs"
            words = " and ".join(filter(None, [self.trainer.words_to_resume(newest), more]))
            facts["checkpoint"] = str(newest)
            facts["resume"] = f"the same command with {words}" if words else "the same command"
        return facts

    def _stood_out(self) -> list[str]:
        """Changes of the ranks, and what was slow."""
        changes = self.train_state.healed[self._changes_before :]
        lines = [f"{change.what} after step {change.step}" for change in changes]
        return [*lines, *(slow.message for slow in self.train_state.slow)]


class PlainProgress(_Progress):
    """One line every `logging.every`, one per epoch, a table at the end. No control characters."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._print(headline(self.model, self.world, self.trainer, self.train_state.differences))

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self.meter.update(self.progress, self.waited)
        steps = f"/{self.steps_per_epoch}" if self.steps_per_epoch else ""
        eta = self.eta()
        left = f"  eta {span_text(eta)}" if eta is not None else ""
        self._print(
            f"{self.position()}  step {self.progress.batch}{steps}  {metrics_text(logs)}  "
            f"{rate_text(self.meter.rates)}{left}{self.wait_text()}"
        )

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._print(f"{self.position()}  step {self.progress.batch}  {metrics_text(logs)}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = as_floats(logs)
        self._epochs[epoch] = values
        self._print(self.epoch_line(epoch, values))
        super().on_epoch_end(epoch, logs)

    def on_slow(self, slow: Slow) -> None:
        self._print(slow.message)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print(self.final_report())

    def _print(self, line: str) -> None:
        if self.reports:
            print(line, flush=True)


class RichProgress(_Progress):
    """A live line with a bar, the metrics below it, a line per epoch above it, and a
    table at the end. The script's own output scrolls above the bar."""

    def __init__(self, every: str | Duration = "1ba", world: World | None = None) -> None:
        super().__init__(every, world)
        self._live: Any = None
        self._metrics: dict[str, float] = {}
        self._validating: int | None = None  # batches validated so far
        self._drawn = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if not self.reports:
            return
        from rich.live import Live

        self.close()
        self.console = _console()
        self._say(headline(self.model, self.world, self.trainer, self.train_state.differences))
        # Redrawn by hand: a thread of its own would compete with the step for the interpreter.
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()
        atexit.register(self.close)  # an error must not leave the cursor hidden
        self._draw(force=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._metrics = {}
        self._draw(force=True)

    def max_updates_per_call(self) -> int | None:
        return None  # calls are shorter than the time from one picture to the next

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._live is not None and time.perf_counter() - self._drawn > REFRESH_SECONDS:
            if self.trainer is None:
                self._metrics = as_floats(logs)
            self.meter.update(self.progress, self.waited)
            self._draw()

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._metrics = {**self._metrics, **logs}
        self._draw()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._validating = 0
        self._draw(force=True)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._validating = batch + 1
        self._draw()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._validating = None
        self._draw(force=True)

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        if self._live is not None:
            self._say(f"{self.position()}  step {step}  {metrics_text(logs)}")
        self._metrics = {**self._metrics, **logs}
        self._draw(force=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._draw(force=True)
        values = as_floats(logs)
        self._epochs[epoch] = values
        if self._live is not None:
            self._say(self.epoch_line(epoch, values))
        super().on_epoch_end(epoch, logs)  # resets the counters

    def on_slow(self, slow: Slow) -> None:
        if self._live is not None:
            self._say(slow.message)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._live is None:
            return
        self.close()
        self._say(self.final_report())

    def _say(self, line: str) -> None:
        """A line that stays, above the bar. No markup: names may hold brackets."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.close)

    def _draw(self, force: bool = False) -> None:
        now = time.perf_counter()
        if self._live is None or not (force or now - self._drawn > REFRESH_SECONDS):
            return
        self._drawn = now
        self._live.update(self._render(), refresh=True)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress, steps = self.progress, self.steps_per_epoch
        eta = self.eta()
        wide = self.console.width >= 110
        parts: list[Any] = [
            Text(self.position(), style="bold"),
            ProgressBar(
                total=steps,
                completed=progress.batch,
                width=40 if wide else 16,
                pulse=steps is None,
            ),
            Text(f"{progress.batch}/{steps}" if steps else f"{progress.batch} steps"),
            Text(rate_text(self.meter.rates if wide else self.meter.rates[:1]), style="cyan"),
            Text(f"ETA {span_text(eta)}" if eta is not None else "", style="green"),
        ]
        row = Table.grid(padding=(0, 2))
        for _ in parts:
            row.add_column(no_wrap=True)
        row.add_row(*parts)
        below = metrics_text(self._metrics) + self.wait_text()
        if self._validating is not None:
            below = f"validating: batch {self._validating}  {below}"
        return Group(row, Text(f"  {below}", no_wrap=True, overflow="ellipsis"))


def _console() -> Any:
    """rich's console; a launcher's pipe counts as the terminal behind it."""
    from rich.console import Console

    if os.environ.get("KTRAINER_TERMINAL") == "1":
        return Console(file=sys.stdout, force_terminal=True)
    return Console(file=sys.stdout)
