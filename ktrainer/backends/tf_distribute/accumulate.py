"""An update on replicas in parts: several shares' gradients, added up, reduced and applied once.

Also how a step is compiled with XLA: the computation of each replica alone, for nothing can be
communicated inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.replicas import Replicas
from ktrainer.steps.captured import one_capture
from ktrainer.steps.logged import LoggedResults
from ktrainer.steps.metric_states import require_sums
from ktrainer.steps.model_step import ShareLike, is_uniform, python_step
from ktrainer.steps.options import StepOptions
from ktrainer.world.plane import weighted

# What one replica has of the gradients of each variable: a tensor, or values and indices.
Gradients = list[Any]


class Accumulated:
    """Updates from several shares, or compiled with XLA.

    The denominators of masked losses must be known before the first backward pass, so they are
    counted first, by the same step, of which TensorFlow keeps only what leads to the masks.

    Args:
        model: a built model, its variables in the strategy.
        options: how steps run.
        replicas: where they run.
        spec: of the data, nested `tf.TensorSpec`; one batch alone may be of one length.
        logged: which of the step's logs are metrics' results.
        compiled: compile each part for itself; False leaves that to the caller.

    Raises:
        ModelError: XLA, and a metric that must see the outputs of all replicas.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: Replicas,
        spec: Any,
        logged: LoggedResults,
        compiled: bool = True,
    ) -> None:
        self.model, self.options, self.replicas = model, options, replicas
        self._logged = logged
        self._uniform = None if spec is None else is_uniform(spec)
        self._optimizer: Any = None
        self._variables: list[Any] = []
        self._kinds: list[type | None] = []
        for name in ("_count", "_compute", "_add", "_update") if compiled else ():
            part = tf.function(getattr(self, name), reduce_retracing=True, autograph=False)
            setattr(self, name, part)
        if options.xla:
            why = "each replica's outputs must go through them in turn, which XLA cannot compile"
            require_sums(model, why, "trainer.xla=false")

    def __call__(self, shares: Sequence[ShareLike]) -> Any:
        """One update; returns the logs of its last share."""
        return self.of(
            [(share.batch, f) for share, f in zip(shares, facts_of(shares), strict=True)]
        )

    def of(self, shares: Sequence[tuple[Any, Any]]) -> Any:
        """The same for pairs of a batch, and its true rows and those of the whole update."""
        counts = [self._count(batch, facts) for batch, facts in shares]
        denominators = counts[0] if len(counts) == 1 else tf.add_n(counts)
        total: list[Gradients] | None = None
        for batch, facts in shares:
            logs, gradients = self._compute(batch, facts, denominators)
            total = gradients if total is None else self._add(total, gradients)
        assert total is not None  # an update has a share
        self._update(total)
        return logs

    def _count(self, batch: Any, share: tf.Tensor) -> tf.Tensor:
        """The denominators of one share's losses, summed over all replicas."""

        def count(rows: Any) -> tf.Tensor:
            context = self.replicas.contexts.here
            python_step(self.model.train_step)(rows)
            found = context.denominators or []
            counted = tf.stack(found) if found else tf.zeros([0], tf.float64)
            if context.plane is None or not found:
                return counted
            return context.plane.sum(counted, context.order)

        settings = self._settings(batch)
        outcome = self.replicas.run(
            count, batch, share, metrics=False, record=True, make_denominators=list, **settings
        )
        return outcome.values[0]

    def _compute(self, batch: Any, share: tf.Tensor, denominators: tf.Tensor) -> Any:
        """The logs of one share, and the gradients that each replica has of it."""

        def compute(rows: Any) -> Any:
            context = self.replicas.contexts.here
            logs = self._logged.noting(python_step(self.model.train_step))(rows)
            self._optimizer, gradients, self._variables = one_capture(context, self.model)
            self._kinds = [None if g is None else type(g) for g in gradients]
            return logs, [_parts(g, context.weight) for g in gradients if g is not None]

        with self._logged.recording():
            outcome = self.replicas.run(
                compute,
                batch,
                share,
                xla=self.options.xla,
                applies=True,
                make_denominators=lambda: tf.unstack(denominators),
                **self._settings(batch),
            )
        logs = self.replicas.conclude(outcome, [v[0] for v in outcome.values], self._logged)
        return logs, [v[1] for v in outcome.values]

    def _add(self, total: list[Gradients], more: list[Gradients]) -> list[Gradients]:
        def add(a: Gradients, b: Gradients) -> Gradients:
            return [_sum(x, y) for x, y in zip(a, b, strict=True)]

        return self.replicas.add(add, total, more)

    def _update(self, total: list[Gradients]) -> None:
        def gradients(part: Gradients) -> list[Any]:
            parts = iter(part)
            pairs = zip(self._kinds, self._variables, strict=True)
            return [None if kind is None else _whole(next(parts), v) for kind, v in pairs]

        hooks = self.options.all_hooks()
        self.replicas.apply(self._optimizer, total, gradients, self._variables, hooks)

    def _settings(self, batch: Any) -> dict[str, Any]:
        uniform = is_uniform(batch) if self._uniform is None else self._uniform
        return {"uniform": uniform, "capture": True}


def facts_of(shares: Sequence[ShareLike]) -> list[np.ndarray]:
    """For each share of one update: its true rows, and those of the whole update."""
    examples = sum(share.global_examples for share in shares)
    return [np.array([share.examples, examples], np.float64) for share in shares]


def _parts(gradient: Any, weight: tf.Tensor) -> Any:
    """Slices stay slices, repeated indices apart, as Keras' optimizers would see them."""
    if isinstance(gradient, tf.IndexedSlices):
        return [weighted(gradient.values, weight), gradient.indices]
    return weighted(gradient, weight)


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [tf.concat([x, y], 0) for x, y in zip(a, b, strict=True)]
    return a + b


def _whole(parts: Any, variable: Any) -> Any:
    if isinstance(parts, (list, tuple)):
        values, indices = parts
        return tf.IndexedSlices(values, indices, tf.constant(tuple(variable.shape), tf.int64))
    return parts
