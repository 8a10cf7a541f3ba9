"""The Trainer: a facade that puts config, ranks, backend, data and callbacks together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktrainer.backends import open_backend
from ktrainer.config import Config, load_config, parse_cli
from ktrainer.config.cluster_environment import cluster_asked
from ktrainer.config.command_line import compare_words, take_words
from ktrainer.config.launch_environment import as_launched
from ktrainer.config.watch_checks import require_trackers
from ktrainer.data.rank_consistency import check_consistency
from ktrainer.distributed import World, open_world
from ktrainer.distributed.launcher_events import report_grace
from ktrainer.errors import ConfigError, ModelError
from ktrainer.plan.run_plan import Plan, make_plan
from ktrainer.plan_report.planning_mode import plan_request, pretend
from ktrainer.runtime.hardware import Hardware
from ktrainer.runtime.tensorflow_logging import loud_tensorflow, quiet_tensorflow
from ktrainer.state.progress import Progress
from ktrainer.state.train_state import TrainState
from ktrainer.state.warning_log import warnings_noted
from ktrainer.training.context import RunContext, RunFolder, check_nested, resolve_model
from ktrainer.training.custom_loop import CustomLoop, leaves_strategy_scope
from ktrainer.training.recovery_protocol import NoRecovery
from ktrainer.tuning.range_test_mode import configure_for_range_test
from ktrainer.tuning.sweep_trial import configure_for_sweep
from ktrainer.verify.verify_mode import configure_for_verify

if TYPE_CHECKING:
    import keras

    from ktrainer.steps import Program
    from ktrainer.training.call_arguments import CallArguments
    from ktrainer.training.recovery_protocol import Recovery
    from ktrainer.training.run import Run


class Trainer(CustomLoop):
    """Trains any Keras 3 model, on as many processes as there are.

    ```python
    trainer = Trainer({"backend": "data_parallel", "trainer": {"epochs": 3}})
    history = trainer.fit(build_model, (x, y), validation_data=(x_val, y_val))
    ```

    Make the Trainer before the model: it picks this process's device, sets the seeds, and the
    precision that layers are made with.

    Args:
        config: a `Config`, a dict, the path of a YAML file, or None for the defaults.
        callbacks: callbacks of every later call, Keras' or ktrainer's.
        overrides: strings `key=value`, applied last.

    Raises:
        ConfigError: something in the configuration cannot work, or cannot work here.
        SetupError: something must be installed, or started in another way.
        DivergenceError: ranks have different configurations.

    Attributes:
        config: the resolved configuration; inside `fit`, with the arguments of that call.
        overruled: one line for each argument of the `fit` that runs that the configuration
            overrides.
        callbacks: those of every later call.
        plan: what the configuration means here.
        world: rank, size, and collectives for user code.
        backend: how steps run on this rank.
        state: all that the `fit` that runs, or else the last one, is: a
            `ktrainer.state.train_state.TrainState`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        loaded = as_launched(load_config(config, overrides))
        if plan_request() is None:
            require_trackers(loaded)
        configured = configure_for_verify(loaded)
        self.config = self._config = configure_for_sweep(configure_for_range_test(configured))
        compare_words(loaded)
        report_grace(self.config.trainer.interrupt.grace)
        self.callbacks = list(callbacks)
        self.world: World = open_world(
            self.config.world.deadline,
            *cluster_asked(self.config),
            heal=self.config.world.heal,
            start_deadline=self.config.world.start_deadline,
        )
        # Before any other collective: which ones follow depends on the configuration.
        check_consistency(self.world, config=self.config.to_dict(redacted=True))
        self._facts = pretend(self.config, Hardware.detect(self.world))
        self.plan: Plan = make_plan(self.config, self._facts)
        self.state = TrainState(joining=self.world.alone)
        self._folder = RunFolder()
        self.overruled: tuple[str, ...] = ()
        self._shown: set[str] = set()  # lines of `overruled` of evaluate and predict
        self._start_tensorflow()

    @classmethod
    def from_cli(
        cls,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        argv: Sequence[str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """A Trainer from `--config FILE` and `key=value` in `argv` (default `sys.argv[1:]`), and
        from those that `ktrainer run` was given.

        `defaults` are the script's own, a nested dict; the file and the command line win. Its group
        `user` holds parameters of the script's own, for `trainer.config.user`.

        A script with flags of its own takes them first, with `parse_known_args`, and hands on
        the rest. A `ConfigError` ends the program with its message and status 2.
        """
        given = [*take_words(), *(sys.argv[1:] if argv is None else argv)]
        try:
            path, overrides = parse_cli(given)
            return cls(load_config(path, overrides, defaults=defaults or {}), callbacks)
        except ConfigError as error:
            # Past a script that catches every Exception, and as `ktrainer plan` itself says it.
            who = type(error).__name__ if plan_request() is None else "ktrainer plan: error"
            print(f"{who}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    @leaves_strategy_scope
    def fit(
        self,
        model: keras.Model | Callable[[], keras.Model],
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | str | None = None,
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str | None = None,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] | None = None,
    ) -> keras.callbacks.History:
        """Train `model`; takes the arguments of `Model.fit`.

        An argument that is also a configuration key is the script's default for this call: a
        config file and the command line win, and the first lines of the display say so.

        Args:
            model: a compiled model, or a function without arguments that returns one.
            x: inputs: an array, or a list, dict or nested structure of arrays; or all of the data:
                a tuple `(x, y[, sample_weight])`, a `tf.data.Dataset`, a
                `keras.utils.PyDataset`, a torch `DataLoader`, or a generator of batches.
            y, sample_weight: targets and weights, for arrays.
            batch_size: `data.batch_size`.
            epochs: `trainer.epochs`; the index of the last epoch, as in Keras.
            verbose: `logging.progress`: 0 is none, 1 and "auto" are auto, 2 is plain.
            callbacks: one or several, after those of the Trainer.
            validation_split: the fraction of arrays, from their end, to validate on.
            validation_data: evaluated every `trainer.validate_every`.
            shuffle: `data.shuffle`; "batch" shuffles within batches.
            class_weight: weight of each class in the loss, by label.
            initial_epoch: number of the first epoch.
            steps_per_epoch: batches of an epoch, before `trainer.accumulate`; the next epoch
                continues with the next batch, as in Keras. `trainer.limit_train_batches` of a file
                or the command line wins, and takes the first batches of every epoch.
            validation_steps: `trainer.limit_val_batches`.
            validation_batch_size: of arrays; default: `batch_size`.
            validation_freq: `trainer.validate_every` in epochs, or a list of epochs (from 1).

        Returns:
            Keras' History, with the same values on every rank.

        Raises:
            ConfigError: an argument has a value that it cannot have.
            DataError, ModelError: what was given cannot be trained on.
            DivergenceError: ranks have different data, models, configs or library versions.
            DeadlineExceeded, PeerLost: another rank did not answer.
            RanksLost: ranks of a pipeline with `world.heal` were lost, and the surviving ranks
                have saved what they could.
            Interrupted: the process was asked to end (`trainer.interrupt`), on all ranks at the
                same step; a SystemExit.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "model")}
        began = time.perf_counter()
        from ktrainer.training.call_arguments import fit_arguments

        call = fit_arguments(self._config, **given)
        with self.call_context(model, call, began) as context:
            return self._fit(context, call)

    def _fit(self, context: RunContext, call: CallArguments) -> keras.callbacks.History:
        from ktrainer.training.run import Run

        if plan_request() is not None:
            from ktrainer.plan_report.report import show_model

            show_model(context, self.model, call.data, [*self.callbacks, *call.callbacks])
        with self.backend.watching():
            run = Run(context, self.state, call, self.callbacks, self)
            try:
                return run.train(self.choose_recovery(run))
            finally:
                run.close()

    @leaves_strategy_scope
    def evaluate(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Loss and metrics of `model` over all of the data, the same on every rank.

        Args:
            model, x, y, batch_size, sample_weight, callbacks: as in `fit`. A `data.batch_size` of a
                file or the command line wins, and a line says so, once.
            verbose: for callbacks that ask `params` for it; nothing is shown.
            steps: batches to evaluate on; default: all.
            return_dict: False for a list, as `Model.evaluate` returns it.

        Raises:
            ConfigError: an argument has a value that it cannot have.
            DataError, ModelError: what was given cannot be evaluated.
            DivergenceError: ranks have different data.
        """
        from ktrainer.training.evaluation import evaluate_call

        model = resolve_model(self.backend, model)
        given = {"batch_size": batch_size, "steps": steps, "callbacks": callbacks}
        call = self._begin_pass("evaluate", model, x, y, sample_weight, verbose=verbose, **given)
        logs = evaluate_call(self._context(), model, call)
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    @leaves_strategy_scope
    def predict(
        self,
        model: Any,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str | None = None,
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The outputs of `model` for all of `x`, in order, as NumPy arrays on every rank; ragged
        ones as a `tf.RaggedTensor`.

        Args:
            model: as in `fit`; it need not be compiled.
            x: inputs: an array, or a list or dict of arrays for several; or data as in `fit`,
                such as `(x, y)` or a tf.data.Dataset, whose labels are not looked at. The same on
                every rank, whatever `data.batch` is.
            batch_size, verbose, steps, callbacks: as in `evaluate`.

        Raises:
            DivergenceError: ranks have different data.
        """
        from ktrainer.training.evaluation import predict_call

        model = resolve_model(self.backend, model)
        given = {"batch_size": batch_size, "steps": steps, "callbacks": callbacks}
        call = self._begin_pass("predict", model, x, verbose=verbose, **given)
        return predict_call(self._context(), model, call)

    @leaves_strategy_scope
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as an ordinary `.keras` file, by rank 0, whole or not at all.

        Local layers are written as rank 0 has them.

        Args:
            path: ends in `.keras`. `ktrainer checkpoint export` writes `.weights.h5` files.
        """
        from ktrainer.checkpoint import save_model

        if self.model is None:
            raise ModelError("there is no model to save yet; call fit first")
        with self.backend.watching():
            save_model(self.model, Path(path), self.world)

    # -- for callbacks, and for scripts between calls

    @property
    def model(self) -> keras.Model | None:
        """The model of the `fit` that runs, or else of the last call."""
        return self.state.model

    @property
    def progress(self) -> Progress:
        """Counters of the current or last `fit`."""
        return self.state.progress

    @property
    def run_dir(self) -> Path:
        """The run's folder, chosen and made by rank 0 when first needed."""
        return self._folder.open(self.config, self.world)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints of this `fit`: `checkpoints`, `checkpoints-2`, ..."""
        return self._context().checkpoint_dir(self.state)

    def words_to_resume(self, checkpoint: str | os.PathLike[str]) -> str:
        """The `key=value` to add to the command of this run to resume from `checkpoint`; empty:
        none are needed."""
        from ktrainer.training.resume import words_to_resume

        return words_to_resume(self._context(), self.state, Path(checkpoint))

    def request_stop(self, reason: str) -> None:
        """End training after the current update, on all ranks."""
        self.state.request_stop(reason)

    def request_rollback(self, reason: str) -> None:
        """Return to the last checkpoint after the current update. Call it on all ranks alike."""
        self.state.request_rollback(reason)

    def program_for(self, model: keras.Model) -> Program:
        """The compiled steps of `model`: those of an earlier call, unless it was compiled again."""
        return self._context().program_for(model)

    @leaves_strategy_scope
    def close(self) -> None:
        """Let go of communicators. May be called twice."""
        self.backend.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for `fit` and `steps`

    @contextmanager
    def call_context(self, model: Any, call: CallArguments, began: float) -> Iterator[RunContext]:
        """Context of a `fit` of `model`, with a state of its own and the configuration of `call`.

        Args:
            began: the moment from which on its time is counted.
        """
        with self._next_state(model, began):
            self.state.model = resolve_model(self.backend, model)
            with self._configured(call) as context:
                yield context

    def choose_recovery(self, run: Run) -> Recovery:
        """What happens when ranks of `run` are lost; all ranks call this together."""
        if not self.world.heals:
            return NoRecovery(self.world)
        from ktrainer.elastic import choose_recovery

        return choose_recovery(run)

    # -- inside

    def _start_tensorflow(self) -> None:
        if self.config.logging.tensorflow:
            loud_tensorflow()
        else:
            quiet_tensorflow()
        from ktrainer.runtime.tensorflow_setup import start_tensorflow

        start_tensorflow(self.config)
        if plan_request() is None:
            self.backend = open_backend(self.config, self.plan, self.world)
        else:
            from ktrainer.backends.local import PlanOnly

            self.backend = PlanOnly(self.config, self.plan, self.world)

    def _context(self) -> RunContext:
        return RunContext(self.config, self.plan, self.world, self.backend, self._folder)

    @contextmanager
    def _configured(self, call: CallArguments) -> Iterator[RunContext]:
        """Have the configuration of a call while it runs."""
        before = self.config, self.overruled, self.plan
        self.config, self.overruled = call.config, call.overruled
        try:
            self.plan = make_plan(call.config, self._facts)
            yield self._context()
        finally:
            self.config, self.overruled, self.plan = before

    @contextmanager
    def _next_state(self, model: Any, began: float) -> Iterator[None]:
        """Begin the state of a `fit`; after one that a callback has called, restore the state of
        the outer one."""
        outer = self.state
        if outer.running:
            check_nested(self._context(), self.model, model)
        self.state = state = outer.next_fit(began)
        timed, self.world.times = self.world.times, self.state.times
        try:
            with warnings_noted(state.warnings, lambda: state.progress.step):
                yield
        finally:
            self.state.running, self.world.times = False, timed
            if outer.running:
                outer.nested, self.state = self.state.nested, outer

    def _begin_pass(self, name: str, model: Any, *data: Any, **given: Any) -> CallArguments:
        """Begin a call of `evaluate` or `predict`; return its arguments."""
        from ktrainer.training.call_arguments import pass_arguments

        call = pass_arguments(name, self.config, *data, **given)
        # Said once; of `fit`, its display says it.
        new = [line for line in call.overruled if line not in self._shown]
        self._shown.update(new)
        if new and self.world.is_root and self.config.logging.progress != "none":
            print("\n".join(new), flush=True)
        if not self.state.running:  # stops and rollbacks mean the model that is trained
            self.state.model = model
        return call
