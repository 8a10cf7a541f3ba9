"""The callback that has rows sent to an experiment tracker.

Events used: `on_train_begin`, `on_log`, `on_epoch_end` (wake the thread, and report its problem),
`close` (send what remains).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ktrainer.callbacks.reporter import Reporter
from ktrainer.callbacks.trackers.sender import Sender
from ktrainer.config.redact import secrets_in
from ktrainer.distributed import World
from ktrainer.errors import ConfigError
from ktrainer.runtime import history_file

CLOSE_SECONDS = 30.0  # the longest that the end of a run waits for its trackers

_RUNS = {
    "wandb": "ktrainer.callbacks.trackers.wandb_run:WandbRun",
    "mlflow": "ktrainer.callbacks.trackers.mlflow_run:MlflowRun",
    "trackio": "ktrainer.callbacks.trackers.trackio_run:TrackioRun",
}


class Tracker(Reporter):
    """Send the rows of a run to a tracker, each once. Needs a trainer.

    A tracker that fails is warned of, once, and tried again with the next rows; at the end of a
    finished run once more, if it lacks some.

    Args:
        name: wandb, mlflow or trackio.
        arguments: those of the tracker's own `init`.
        live: the run has no checkpoints.

    Attributes:
        others: trackers of the same run, which end at the same time.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], live: bool) -> None:
        super().__init__()
        self.name, self.arguments, self.live = name, arguments, live
        self.others: list[Tracker] = []
        self._sender: Sender | None = None
        self._said = False

    @property
    def _run_class(self) -> Any:
        module, _, kind = _RUNS[self.name].partition(":")
        return getattr(import_module(module), kind)

    def check(self) -> None:
        """Refuse arguments that the library does not know. Imports it.

        Raises:
            ConfigError: for the first one found, or if it cannot be imported.
        """
        try:
            self._run_class.check(self.arguments)
        except ConfigError:
            raise
        except Exception as error:  # of any kind, as where versions do not fit
            raise ConfigError(
                f"the package {self.name} cannot be imported: {error}. Mend its installation, or "
                f"set logging.{self.name}=null.",
                path=f"logging.{self.name}",
            ) from None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._end()
        folder, sent = self.run_dir, self.run_path(f"{self.name}.json")
        if not self.reports or folder is None or sent is None:
            return
        state, config = self.train_state, self.trainer.config
        self._sender = Sender(
            self._run_class,
            self.arguments,
            folder / history_file.NAME,
            sent,
            (max(1, state.fits), state.inside),
            self.live,
            (*config._secrets, *secrets_in(config.to_dict())),
        )

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._wake()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._wake()

    def checkpoint_saved(self, step: int, path: Path, facts: Mapping[str, Any]) -> None:
        """Have the rows before it sent; called by the thread that has written it."""
        if self._sender is not None:
            self._sender.wake()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing: `close` knows how the run has ended."""

    def close(self) -> None:
        for tracker in (self, *self.others):  # they send what remains at the same time
            if tracker._sender is not None:
                tracker._sender.finish(self.train_state.end.get("reason"))
        self._end()

    def _end(self) -> None:
        """Wait until the thread has sent what remains."""
        sender, self._sender = self._sender, None
        if sender is None:
            return
        reason = self.train_state.end.get("reason")
        missing = sender.close(reason, CLOSE_SECONDS)
        self._report(sender.problem, missing if reason == "finished" else 0)

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()
            self._report(self._sender.problem)

    def _report(self, problem: str | None, missing: int = 0) -> None:
        """Warn, once, and of rows that are `missing` at the end."""
        if problem is None or (self._said and not missing):
            return
        self._said = True
        steps = "1 step" if missing == 1 else f"{missing} steps"
        lacks = f" It lacks the values of {steps}." if missing else ""
        warnings.warn(
            f"logging.{self.name}: the tracker failed ({problem}).{lacks} Training is not "
            "affected; what it lacks is sent when it answers, also by a later run with the same "
            "run.dir, and is in history.jsonl there.",
            stacklevel=2,
        )


def import_trackers(callbacks: Iterable[Any], world: World) -> None:
    """Import trackers and check their arguments on rank 0, which alone uses them: they take long
    to import, and much memory. All ranks call this together.

    Raises:
        ConfigError: on all ranks, for the first argument found that a library does not know.
    """
    trackers = [callback for callback in callbacks if isinstance(callback, Tracker)]
    problem = None
    if trackers and world.is_root:
        try:
            for tracker in trackers:
                tracker.check()
        except ConfigError as error:
            problem = error
    if trackers:
        problem = world.broadcast(problem, what="arguments of trackers")
    if problem is not None:
        raise problem
