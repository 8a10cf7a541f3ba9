"""`trainer.steps`: the run of a `fit`, whose updates are the body of a loop of the user's own.

The loop, its callbacks, checkpoints, signals and recovery are those of `fit`
(`ktrainer.training.loop`); where `fit` calls the model's step, the loop yields a batch instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import gradient_hooks
from ktrainer.checkpoint.contents.capture_state import variables_here
from ktrainer.data.rank_consistency import check_consistency
from ktrainer.errors import ConfigError, DataError
from ktrainer.steps import Program
from ktrainer.steps.strategy_scope import outside_strategy_scope
from ktrainer.training.call_arguments import CallArguments, fit_arguments
from ktrainer.training.fit_settings import versions_that_compute
from ktrainer.training.loop_state import LoopModel, LoopValues, as_list
from ktrainer.training.run import Run
from ktrainer.training.run_facts import end_facts

if TYPE_CHECKING:
    from ktrainer.backends.backend import Backend
    from ktrainer.config import Config
    from ktrainer.distributed import World
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.context import RunContext
    from ktrainer.training.recovery_protocol import Recovery


class StepsTrainer(Protocol):
    """The `ktrainer.Trainer` of a loop over `trainer.steps`."""

    world: World
    backend: Backend
    state: TrainState
    callbacks: list[keras.callbacks.Callback]

    def call_context(
        self, model: Any, call: CallArguments, began: float
    ) -> AbstractContextManager[RunContext]:
        """Context of the run, in which `state` is its own."""

    def choose_recovery(self, run: Run) -> Recovery:
        """What happens when ranks of `run` are lost; all ranks call this together."""


class UserProgram(Program):
    """The place of a model's steps in a run whose steps are the user's own.

    Args:
        model: the loop's state.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def build(self, spec: Any, training: bool = True) -> None:
        """Do nothing: the user's models are built."""

    def train(self, local_batches: Any) -> Any:
        """Do nothing: a joining rank has no step to warm up."""
        return {}

    def test(self, local_batch: Any) -> Any:
        return {}

    def predict(self, local_batch: Any) -> Any:
        return None

    def finalize_weights(self) -> None:
        """Leave averaged weights to the user, as a loop without a Trainer does."""


class StepsRun(Run):
    """A run whose updates are the user's own."""

    def check(self) -> None:
        """`open_steps` has checked the settings; the models need no `compile`."""

    def steps(self, recovery: Recovery) -> Generator[Any, Any, None]:
        """Yield all updates; is sent their logs."""
        with self.loop(recovery) as loop:
            yield from recovery.updates(loop)

    def _open_program(self) -> None:
        for hook in gradient_hooks(self.every):
            raise ConfigError(
                f"{getattr(hook, '__self__', hook)!r} overrides on_gradients, which changes the "
                "gradients in the step of a fit. In a loop over trainer.steps the step is yours, "
                "and nothing would call it: change the gradients there, or use trainer.fit"
            )
        self.state.program = UserProgram(self.model)
        world = self.context.world
        facts = self.state.data_facts = self.feeds.facts()
        if world.size > 1:
            check_consistency(world, data_facts=facts, versions=versions_that_compute())


class Steps:
    """The batches of a loop of the user's own, around which a run does what `fit` does.

    Made by `trainer.steps`. The body of the loop is one update: whatever the next batch is asked
    for counts as done. `break` ends the loop without a last checkpoint; `with trainer.steps(...) as
    steps:` closes files at once, also after an error.

    Args:
        trainer: whose state and configuration are those of the loop while it runs.
        call: its data and settings.
        model: the loop's state.
        began: the moment from which on its time is counted.
    """

    def __init__(
        self, trainer: StepsTrainer, call: CallArguments, model: LoopModel, began: float
    ) -> None:
        self._trainer, self._model, self._stack = trainer, model, ExitStack()
        self._running: Generator[Any, Any, None] | None = None
        self._logs: dict[str, Any] = {}
        self._of_epoch: dict[str, Any] = {}
        self._begun = self._over = False
        try:
            context = self._stack.enter_context(trainer.call_context(model, call, began))
            self._state = trainer.state
            self._user_loop = context.backend.loop
            self._stack.enter_context(trainer.backend.watching())
            run = StepsRun(context, self._state, call, trainer.callbacks, trainer)
            self._stack.callback(run.close)
            if context.world.heals:
                self._user_loop.heal_steps([v for _, v in variables_here(model)])
                self._stack.callback(self._user_loop.heal_steps, None)
            self._running = run.steps(trainer.choose_recovery(run))
            self._stack.callback(self._running.close)
        except BaseException:
            self._stack.close()
            raise

    # -- in the loop

    def log(self, **logs: Any) -> None:
        """Report numbers of this step: to the NaN guard, the display and the loggers.

        Args:
            logs: scalars by name. A name with "loss" in it is watched for NaN. The last ones of an
                epoch are the epoch's. Where ranks report different values, their mean counts.
        """
        self._logs.update(logs)

    @property
    def step(self) -> int:
        """Updates done before this one, in all."""
        return int(self._state.progress.step)

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return int(self._state.progress.epoch)

    @property
    def batch(self) -> int:
        """Updates done before this one in the epoch."""
        return int(self._state.progress.batch)

    @property
    def epoch_begins(self) -> bool:
        """Whether this is the first update of an epoch: the time to reset metrics."""
        return self.batch == 0

    @property
    def history(self) -> dict[str, list[Any]]:
        """The logs of each epoch so far, by name."""
        history = getattr(self._model, "history", None)
        return {} if history is None else history.history

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over or self._running is None:
            raise StopIteration
        try:
            with outside_strategy_scope(device=self._trainer.backend.name == "tf_distribute"):
                updates = self._next_updates(self._running)
        except BaseException:  # the end, too
            self.close()
            raise
        return self._user_loop.rows(updates[0][0])

    def _next_updates(self, running: Generator[Any, Any, None]) -> Any:
        logs = self._take_logs()
        if not self._begun:
            self._begun = True
            return next(running)
        error = self._user_loop.take_error()
        if error is None:
            return running.send(logs)
        self._of_epoch = {}  # also drops logs of the interrupted step, which comes again
        return running.throw(error)

    def _take_logs(self) -> dict[str, Any]:
        """The newest numbers of the epoch, those of this step among them."""
        if self._begun and self.batch == 0:
            self._of_epoch = {}
        elif not self._of_epoch:  # resumed inside an epoch
            self._of_epoch = _without_bad(self._state.counted.logs or {})
        new, self._logs = self._logs, {}
        logs = {**self._of_epoch, **new}
        # A loss that was not finite counts once: a rollback may follow.
        self._of_epoch = _without_bad(logs)
        return logs

    def close(self) -> None:
        """End the loop, if it has not ended: wait for a checkpoint that is being written, and let
        go of files and signals. May be called twice."""
        if not self._over:
            self._over = True
            self._stack.close()
            if len(self._model.parts) == 1:  # for `trainer.save`
                self._state.model = self._model.parts[0]

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None and not self._over:
            self._state.end = end_facts(error)  # the loop itself hears only of its end
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self.close()


def _without_bad(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs that are not NaN or infinite."""
    return {name: value for name, value in logs.items() if not _is_bad(value)}


def _is_bad(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not np.isfinite(value)


def open_steps(
    trainer: StepsTrainer,
    began: float,
    config: Config,
    model: Any,
    optimizer: Any,
    state: Any,
    **given: Any,
) -> Steps:
    """The steps of `trainer.steps`.

    Args:
        began: when that was called, by `time.perf_counter`.

    Raises:
        ConfigError, DataError, ModelError: something cannot work.
    """
    if state is not None and not isinstance(state, dict):
        raise ConfigError(
            f"trainer.steps(state=...) takes a dict of names and objects, not {type(state)}"
        )
    check_settings(config)
    state = {} if state is None else state
    is_first = trainer.world.is_first_replica
    loop_model = LoopModel(as_list(model), as_list(optimizer), state, is_first)
    given["x"] = _global_batches(given["x"])
    given["callbacks"] = [LoopValues(state), *as_list(given["callbacks"])]
    return Steps(trainer, fit_arguments(config, **given), loop_model, began)


def check_settings(config: Config) -> None:
    """Refuse settings that only the steps of a `fit` can follow.

    Raises:
        ConfigError: naming the key.
    """
    if (error := setting_of_updates(config)) is not None:
        raise error
    _check_measurements(config)
    strategy = getattr(config.backend, "strategy", None)
    if strategy == "parameter_server":
        raise ConfigError(
            "trainer.steps gives one batch after the other, and parameter servers have several "
            "steps under way at once, so there is no step at which a checkpoint could be made. "
            "Use trainer.schedule and trainer.join with a loop of your own, or trainer.fit",
            path="backend.strategy",
            value=strategy,
        )


def setting_of_updates(config: Config) -> ConfigError | None:
    """The error of a setting of how an update is made; None if there is no such setting."""
    trainer, clip, health = config.trainer, config.trainer.clip, config.health
    only_fit: list[tuple[str, Any, bool]] = [
        ("trainer.accumulate", trainer.accumulate, trainer.accumulate != 1),
        ("trainer.steps_per_call", trainer.steps_per_call, trainer.asks_for_several_steps),
        ("trainer.xla", trainer.xla, trainer.xla),
        ("trainer.loss_scope", trainer.loss_scope, trainer.loss_scope == "global"),
        ("trainer.clip.global_norm", clip.global_norm, clip.global_norm is not None),
        ("trainer.clip.norm", clip.norm, clip.norm is not None),
        ("trainer.clip.value", clip.value, clip.value is not None),
        ("health.spike", health.spike, health.spike is not None),
        ("health.nan", health.nan, health.nan == "skip"),
    ]
    for path, value, wrong in only_fit:
        if wrong:
            return ConfigError(
                f"{path}={value} changes how an update is made, which in a loop of your own is "
                "your step: it would have no effect. Leave it out, and do it in the step (an "
                "optimizer has gradient_accumulation_steps, clipnorm and global_clipnorm)",
                path=path,
                value=value,
            )
    return None


def _check_measurements(config: Config) -> None:
    """Refuse settings of what is measured inside a step."""
    measured = {
        "watch.norms": config.watch.norms,
        "watch.utilization": config.watch.utilization or None,
        "logging.histograms": config.logging.histograms,
    }
    for path, value in measured.items():
        if value is not None:
            raise ConfigError(
                "it is measured in the step of a fit, and in a loop of your own the step is yours. "
                "Leave it out, and report numbers with steps.log",
                path=path,
                value=value,
            )


def _global_batches(data: Any) -> Any:
    """The data that `trainer.distribute` was given, as the run itself gives each rank its rows."""
    if callable(data) and not isinstance(data, tf.data.Dataset):
        return lambda: _global_batches(data())
    if hasattr(data, "global_batches"):
        return data.global_batches
    if isinstance(data, tf.distribute.DistributedDataset):
        raise DataError(
            "this data was distributed by a strategy: its position cannot be saved. Give "
            "trainer.steps the tf.data.Dataset, or what trainer.distribute returns"
        )
    return data
