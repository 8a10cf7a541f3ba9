"""The Trainer: puts config, world, backend, data and callbacks together, and nothing else."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktrainer import commandline
from ktrainer.config import Config, load_config, parse_cli
from ktrainer.config.cluster import cluster_asked
from ktrainer.config.launched import as_launched
from ktrainer.counted import Counted
from ktrainer.custom import CustomLoop, leaves_strategy_scope
from ktrainer.errors import ConfigError, ModelError
from ktrainer.facts import WorldFacts
from ktrainer.plan import Plan, make_plan
from ktrainer.preflight import check_agreement, data_facts
from ktrainer.preview.mode import asked, pretend
from ktrainer.progress import Progress
from ktrainer.quiet import loud_tensorflow, quiet_tensorflow
from ktrainer.telling import tell_grace
from ktrainer.verify.mode import configure_for_verify
from ktrainer.world import World, open_world

if TYPE_CHECKING:
    import keras

    from ktrainer.arguments import CallArguments
    from ktrainer.config import DataConfig
    from ktrainer.feed import Feed
    from ktrainer.steps import StepOptions, Steps

# Attributes that come back when a `fit` inside another has ended.
_STATE_OF_FIT = (
    "model",
    "progress",
    "counted",
    "timers",
    "steps_per_epoch",
    "epoch_complete",
    "stop_reason",
    "unsound",
    "rollback",
    "inside",
    "_active",
)


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
        progress: counters of the current or last `fit`.
        model: the model of the `fit` that runs, or else of the last call.
        timers: seconds spent so far, by what: "data", "step", "communication"
            (where the engine can tell).
        steps_per_epoch: updates an epoch; None when unknown.
        fits: how often `fit` has begun to train; one that is refused before does not count, nor
            does one inside another.
        inside: the number of this `fit` among those that callbacks of another have called; 0 for
            one that no callback has called.
        healed: what became of the ranks since this Trainer was made, as `ktrainer.healing.Healed`.
        joining: whether this process is about to join ranks that train already.
        stop_reason: why a callback has asked for the end of training; None if none has.
        unsound: whether the last update has spoilt the model, as far as `health` can tell: no
            checkpoint of it is saved.
        rollback: why the run is to go back to the last checkpoint; None if it is not.
        epoch_complete: in `on_epoch_end`, whether the epoch was not cut short by a stop.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        loaded = as_launched(load_config(config, overrides))
        self.config = self._config = configure_for_verify(loaded)
        tell_grace(self.config.trainer.interrupt.grace)
        self.callbacks = list(callbacks)
        self.world: World = open_world(
            self.config.world.deadline,
            *cluster_asked(self.config),
            heal=self.config.world.heal,
            start_deadline=self.config.world.start_deadline,
        )
        # Before any other collective: which ones follow depends on the configuration.
        check_agreement(self.world, config=self.config.to_dict(redacted=True))
        self._facts = pretend(self.config, WorldFacts.detect(self.world))
        self.plan: Plan = make_plan(self.config, self._facts)
        self.progress, self.counted = Progress(), Counted()
        self.timers: dict[str, float] = defaultdict(float)
        self.model: keras.Model | None = None
        self.steps_per_epoch: int | None = None
        self.epoch_complete = True
        self.stop_reason: str | None = None
        self.unsound = False
        self.rollback: str | None = None
        self._run_dir: Path | None = None
        self.fits = self.inside = self._fits_inside = 0
        self.healed: list[Any] = []
        self.joining = bool(getattr(self.world, "alone", False))
        self._active: Any = None
        self._fitting = False
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

        `defaults` are the script's own, a nested dict; the file and the command line win.

        A script with flags of its own takes them first, with `parse_known_args`, and hands on
        the rest. A `ConfigError` ends the program with its message and status 2.
        """
        try:
            path, overrides = parse_cli(
                [*commandline.words, *(sys.argv[1:] if argv is None else argv)]
            )
            return cls(load_config(path, overrides, defaults=defaults), callbacks)
        except ConfigError as error:
            # Past a script that catches every Exception, and as `ktrainer plan` itself says it.
            who = type(error).__name__ if asked() is None else "ktrainer plan: error"
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
        """Train `model`; takes what `Model.fit` takes.

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
            RanksDied: ranks of a pipeline with `world.heal` died, and the others have saved what
                they could.
            Interrupted: the process was asked to end (`trainer.interrupt`), on all ranks at the
                same step; a SystemExit.
        """
        from ktrainer.arguments import fit_arguments

        call = fit_arguments(
            self._config,
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
        )
        with self._state_of_its_own(model):
            self.model = self._resolve(model)
            return self._fit(call)

    def _fit(self, call: CallArguments) -> keras.callbacks.History:
        from ktrainer.fit import Fit

        if asked() is not None:
            from ktrainer.preview.report import show_model

            with self._configured(call):
                show_model(self, call.data, call.callbacks)
        with self.backend.watching(), self._configured(call):
            self._active = Fit(self, call)
            if not self.inside:
                self.fits += 1
            try:
                return self._active.run()
            finally:
                self._active.close()

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
            verbose: accepted for compatibility and ignored.
            steps: batches to evaluate on; default: all.
            return_dict: False for a list, as `Model.evaluate` returns it.

        Raises:
            ConfigError: an argument has a value that it cannot have.
            DataError, ModelError: what was given cannot be evaluated.
            DivergenceError: ranks have different data.
        """
        from ktrainer.arguments import pass_arguments
        from ktrainer.evaluation import common_logs, evaluate

        call = pass_arguments(
            "evaluate",
            self.config,
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps,
            callbacks=callbacks,
        )
        run = partial(evaluate, common_logs=common_logs(self))
        model = self._resolve(model)
        logs = self._over(model, call, run, call.config.data)
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
        """The outputs of `model` for all of `x`, in order, as NumPy arrays on every rank.

        Args:
            model: as in `fit`; it need not be compiled.
            x: inputs: an array, or a list or dict of arrays for several; or data as in `fit`,
                such as `(x, y)` or a tf.data.Dataset, whose labels are not looked at. The same on
                every rank, whatever `data.batch` is.
            batch_size, verbose, steps, callbacks: as in `evaluate`.

        Raises:
            DivergenceError: ranks have different data.
        """
        from ktrainer.arguments import pass_arguments
        from ktrainer.evaluation import predict

        call = pass_arguments(
            "predict", self.config, x, batch_size=batch_size, steps=steps, callbacks=callbacks
        )
        # Dealt out, the rows would come back in another order.
        return self._over(
            model, call, predict, replace(call.config.data, shard="batch", batch="global")
        )

    @leaves_strategy_scope
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as an ordinary `.keras` file, by rank 0, whole or not at all."""
        from ktrainer.checkpoint import save_model

        if self.model is None:
            raise ModelError("there is no model to save yet; call fit first")
        save_model(self.model, Path(path), self.world)

    @property
    def run_dir(self) -> Path:
        """The run's folder, chosen and made by rank 0 when first needed."""
        if self._run_dir is None:
            from ktrainer.runfolder import open_run_folder

            self._run_dir = open_run_folder(self.config, self.world)
        return self._run_dir

    def take_run_dir(self, path: Path) -> None:
        """Use the folder that the other ranks use."""
        self._run_dir = path

    @property
    def checkpoint_dir(self) -> Path:
        """Where the checkpoints of this `fit` go.

        Each `fit` of a script has a folder of its own (`checkpoints`, `checkpoints-2`, ...), so
        that a script that trains in several parts goes on in the right one.
        """
        from ktrainer.runfolder import of_fit

        path = Path(self.config.checkpoint.dir or self.run_dir / "checkpoints")
        return of_fit(path, self.fits, self.inside)

    @property
    def feed(self) -> Feed | None:
        """The training data of the `fit` that runs."""
        return self._active.feed if self._active is not None else None

    @property
    def communication_seconds(self) -> float | None:
        """Seconds this rank has waited in gradient communication so far; None if unknown."""
        return self.backend.communication_seconds

    def settle(self) -> None:
        """Wait for updates that still run (parameter servers); weights and metrics are then up to
        date."""
        if self._active is not None:
            self._active.program.finish()

    def place_facts(self) -> dict[str, Any]:
        """What the position in the training data depends on, by name."""
        return self._active.place_facts()

    def request_stop(self, reason: str) -> None:
        """End training after the current update, on all ranks."""
        self.stop_reason = reason
        if self.model is not None:
            self.model.stop_training = True

    def request_rollback(self, reason: str) -> None:
        """Go back to the last checkpoint after the current update. Call it on all ranks alike."""
        self.rollback, self.unsound = reason, True

    def _resume(self) -> None:
        """Restore the run's newest checkpoint, or the one asked for; called by the loop."""
        self._active.resume()

    @leaves_strategy_scope
    def close(self) -> None:
        """Let go of communicators. May be called twice."""
        self.backend.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_tensorflow(self) -> None:
        if self.config.logging.tensorflow:
            loud_tensorflow()
        else:
            quiet_tensorflow()
        from ktrainer.start import start_tensorflow

        start_tensorflow(self.config)
        from ktrainer.backends import open_backend

        if asked() is None:
            self.backend = open_backend(self.config, self.plan, self.world)
        else:
            from ktrainer.preview.backend import Planning

            self.backend = Planning(self.config, self.plan, self.world)

    def _resolve(self, model: Any) -> keras.Model:
        import keras

        if not isinstance(model, keras.Model) and callable(model):
            model = self.backend.build_model(model)
        if not isinstance(model, keras.Model):
            raise ModelError(
                f"expected a keras.Model, or a function that returns one, got {type(model)}; pass "
                "keras.Sequential(...), or build_model without calling it"
            )
        return model

    @contextmanager
    def _configured(self, call: CallArguments) -> Iterator[None]:
        """Have the configuration of a call while it runs."""
        before = self.config, self.overruled, self.plan
        self.config, self.overruled = call.config, call.overruled
        try:
            self.plan = make_plan(call.config, self._facts)
            yield
        finally:
            self.config, self.overruled, self.plan = before

    @contextmanager
    def _state_of_its_own(self, model: Any) -> Iterator[None]:
        """Begin the state of a `fit`; after one that a callback has called, the state of the `fit`
        that it is inside of comes back."""
        outer = {name: getattr(self, name) for name in _STATE_OF_FIT} if self._fitting else None
        if outer is not None:
            self._check_inside(model)
            self._fits_inside += 1
            self.inside = self._fits_inside
        else:
            self._fits_inside = 0
        self.progress, self.counted, self.timers = Progress(), Counted(), defaultdict(float)
        self.stop_reason = self.rollback = None
        self.unsound, self._fitting = False, True
        try:
            yield
        finally:
            self._fitting = outer is not None
            for name, value in (outer or {}).items():
                setattr(self, name, value)

    def _check_inside(self, model: Any) -> None:
        """Refuse a `fit` of `model` in a callback of another.

        Raises:
            ModelError: it cannot run there.
        """
        where = "a callback of fit calls fit"
        if self.world.heals:
            raise ModelError(
                f"{where}, which cannot be healed: ranks that join would not know of it. Set "
                "world.heal=off, or train the other model before or after this one."
            )
        if model is self.model and self.backend.name == "pipeline":
            raise ModelError(
                f"{where} for the same model, whose stages are being trained. Train it before or "
                "after this fit, or make another model."
            )

    def _show_overruled(self, call: CallArguments) -> None:
        """Say once what the configuration overrides of `evaluate` and `predict`; of `fit`, its
        display says it."""
        new = [line for line in call.overruled if line not in self._shown]
        self._shown.update(new)
        if self.world.is_root and self.config.logging.progress != "none":
            for line in new:
                print(line, flush=True)

    def _over(
        self, model: Any, call: CallArguments, run: Callable[..., Any], config: DataConfig
    ) -> Any:
        """Evaluate or predict over a call's data, with the program of the last one if it fits."""
        import keras

        from ktrainer.feed import make_feed, require_end

        self._show_overruled(call)
        model = self._resolve(model)
        if not self._fitting:  # stops and rollbacks mean the model that is trained
            self.model = model
        program = self.program_for(model)
        check = self.config.health.check_data
        feed = make_feed(
            call.data,
            world=self.world,
            config=config,
            training=False,
            check=check,
            limit=call.batches_per_epoch,
        )
        require_end(feed, "steps=...")
        callbacks = keras.callbacks.CallbackList(
            list(call.callbacks), model=model, add_history=False
        )
        try:
            if check and self.world.size > 1:
                check_agreement(self.world, data_facts=data_facts(feed, "given"))
            with self.backend.watching():
                return run(program, feed, callbacks, self.world)
        finally:
            feed.close()

    def program_for(self, model: keras.Model, options: StepOptions | None = None) -> Steps:
        """The compiled steps of `model`: those of an earlier call, unless it was compiled again.

        Args:
            options: how steps run; None for those of its last `fit`, or of the configuration.
        """
        from ktrainer.fit_settings import step_options
        from ktrainer.steps.program_cache import cached_program

        return cached_program(
            model,
            options or step_options(self.config),
            [self.backend, self.world.rank, self.world.size],
            self.backend.prepare,
            any_options=options is None,
        )
