"""A model's steps under a synchronous strategy: shares in, logs out as tensors, unread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import keras
import tensorflow as tf

from ktrainer.backends.tf_distribute.accumulate import Accumulated, facts_of
from ktrainer.backends.tf_distribute.moving import move_in
from ktrainer.backends.tf_distribute.outputs import joined_outputs
from ktrainer.backends.tf_distribute.replicas import Replicas
from ktrainer.errors import ModelError
from ktrainer.feed.source import require_examples
from ktrainer.feed.specs import spec_of
from ktrainer.step_logs import LogPath
from ktrainer.steps import Program, StepOptions
from ktrainer.steps.assertions import error_of_split, explain_assertions
from ktrainer.steps.base import Logs, Steps
from ktrainer.steps.logged import LoggedResults, Source
from ktrainer.steps.loss_scope import refuse_xla
from ktrainer.steps.metric_states import require_sums, unadded_metrics
from ktrainer.steps.model_step import ShareLike, global_seed, python_step
from ktrainer.steps.multi import compile_many, stack_shares
from ktrainer.steps.program import on_tensors, trace
from ktrainer.steps.strategy_variables import generation, unwrap_variables

Share = tf.TensorSpec([2], tf.float64)
_ONE_DEVICE = "Set backend.devices=1, which is one replica, or backend=local"


class ReplicatedProgram(Steps):
    """The compiled steps of one model on all replicas of this process.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        replicas: where they run.
        guard: makes the context in which steps run, which explains errors of other processes.
        agree: whether something is so on any process; all of them call it together.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: Replicas,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        if replicas.one_trace:  # and with XLA, as ever on a TPU
            options = replace(options, xla=False)
        refuse_xla(options, replicas.plane)
        self.model, self.options, self.replicas, self.guard = model, options, replicas, guard
        self._agree = agree
        self._generation = generation()
        # Makes the variables, which then move into the strategy.
        self._maker = Program(model, options)
        self._specs: dict[str, Any] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._accumulated: Accumulated | None = None
        self._logged = {kind: LoggedResults(model) for kind in ("train", "test")}

    def build(self, spec: Any, training: bool = True) -> None:
        kind = "train" if training else "test"
        if self._specs.get(kind) is spec:
            return
        global_seed()  # else replicas would each make one while they are traced, without a value
        self._specs[kind] = spec
        self._functions = {k: f for k, f in self._functions.items() if k not in (kind, "many")}
        if training:
            self._accumulated = None
        self._place(self._maker.is_built(training), lambda: self._maker.build(spec, training))
        if self.replicas.one_trace:
            self._check_traceable()

    def _renew_for(self, *shares: ShareLike) -> None:
        """Make ready to run the shares, which are cut for the replicas of this process."""
        self._renew()
        if self.replicas.count > 1:
            for share in shares:
                require_examples(share.batch, 0, self.replicas.count, _ONE_DEVICE)

    def train(self, shares: Sequence[ShareLike]) -> Logs:
        self._renew_for(*shares)
        if self.options.accumulate == 1 and not self.options.xla:
            with self._explained(shares):
                return self._function("train")(shares[0].batch, facts_of(shares)[0])
        if self._accumulated is None:
            self._accumulated = Accumulated(
                self.model,
                self.options,
                self.replicas,
                self._specs.get("train"),
                self._logged["train"],
            )
        with self._explained(shares):
            return self._accumulated(shares)

    def train_many(self, shares: Sequence[ShareLike]) -> Logs:
        stacked = None
        if len(shares) > 1 and not self.options.xla:
            stacked = stack_shares(shares, lambda share: facts_of([share])[0])
            # Sums are numbered as functions are called: all processes must call the same ones.
            stacked = None if self._agree(stacked is None) else stacked
        if stacked is None:
            for share in shares:
                logs = self.train([share])
            return logs
        self._renew_for(*shares)
        if "many" not in self._functions:
            self._functions["many"] = compile_many(self._function("train"))
        with self._explained(shares):
            return self._functions["many"](*stacked)

    def test(self, share: ShareLike) -> Logs:
        self._renew_for(share)
        with self._explained([share]):
            return self._function("test")(share.batch, *facts_of([share]))

    def predict(self, share: ShareLike) -> Any:
        self._renew_for(share)
        self._place_for_prediction(share)
        with self._explained([share]):
            outputs = self._function("predict")(share.batch, *facts_of([share]))
        return keras.tree.map_structure(lambda t: t.numpy(), outputs)

    def sources(self, kind: Literal["train", "test"]) -> Mapping[LogPath, Source | None]:
        return self._logged[kind].sources

    @contextmanager
    def _explained(self, shares: Sequence[ShareLike]) -> Iterator[None]:
        """In which a step runs, and its errors are explained."""
        try:
            with self.guard(), explain_assertions():
                yield
        except tf.errors.OpError as error:
            cause = error_of_split(error, shares, self.replicas.count, f"s{_ONE_DEVICE[1:]}")
            if cause is not None:
                raise cause from error
            raise

    def _function(self, kind: str) -> Callable[..., Any]:
        """The compiled step, made at first use."""
        if kind not in self._functions:
            step = self._predict if kind == "predict" else self._traced(kind)
            if self.model.run_eagerly:
                traced = on_tensors(step)
            else:
                traced = tf.function(step, reduce_retracing=True, autograph=False)
                if kind in self._specs:
                    traced.get_concrete_function(self._specs[kind], Share)
            self._functions[kind] = traced
        return self._functions[kind]

    def _traced(self, kind: str) -> Callable[..., Any]:
        training = kind == "train"
        if training and self.options.guard is not None:
            check_metrics(self.model)
        logged = self._logged[kind]
        step = logged.noting(
            python_step(self.model.train_step if training else self.model.test_step)
        )

        def on_all(batch: Any, share: tf.Tensor) -> Any:
            settings: dict[str, Any] = {}
            if training:
                settings = {"hooks": self.options.all_hooks(), "guard": self.options.guard}
            with logged.recording():
                outcome = self.replicas.run(step, batch, share, applies=training, **settings)
            return self.replicas.conclude(outcome, outcome.values, logged)

        return on_all

    def _predict(self, batch: Any, share: tf.Tensor) -> Any:
        step = python_step(self.model.predict_step)
        outcome = self.replicas.run(step, batch, share, metrics=False)
        for variable, value in outcome.statistics:  # the states of random layers
            variable.assign(value)
        return joined_outputs(outcome.values, tf.cast(share[0], tf.int64))

    def _place_for_prediction(self, share: ShareLike) -> None:
        """Have the variables that `predict` needs, at its first call."""
        if "predict" not in self._functions:
            built = all(layer.built for layer in self.model._flatten_layers())
            spec = spec_of(share.batch)
            self._place(built, lambda: trace(self.model.predict_step, spec))

    def _place(self, built: bool, build: Callable[[], None]) -> None:
        """Have the model's variables in the strategy, made first where they are missing."""
        strategy = self.replicas.strategy
        if not built:
            # Tracing can make no variables inside of a strategy.
            self._functions.clear()
            unwrap_variables(self.model)
            build()
        move_in(self.model, strategy)
        self._generation = generation()

    def _check_traceable(self) -> None:
        """Refuse what a TPU cannot do, whose replicas are one program.

        Raises:
            ModelError: a metric must see the replicas' outputs in turn, or steps are not compiled.
        """
        why = "each replica's outputs must go through them in turn, which a TPU cannot compile"
        require_sums(self.model, why, "choose another strategy")
        if self.model.run_eagerly:
            raise ModelError(
                "a TPU runs compiled steps only: compile the model with run_eagerly=False, or "
                "choose another strategy."
            )

    def _renew(self) -> None:
        """Compile anew after somebody else, such as another Trainer, has moved the model."""
        if self._generation != generation():
            self._functions.clear()
            self._accumulated = None
            self._place(True, lambda: None)


def check_metrics(model: keras.Model) -> None:
    """Refuse metrics that cannot be put back when an update is left out.

    Raises:
        ModelError: there are some.
    """
    if names := [metric.name for metric in unadded_metrics(model)]:
        raise ModelError(
            f"the states of {', '.join(names)} do not add up, as far as is known, so what an "
            "update that is left out has counted cannot be taken back. Set `state_adds_up = True` "
            "on the metric's class if they do, or health.nan and health.on_spike to stop or "
            "rollback."
        )
