"""Metrics in a step on replicas, while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.tf_distribute.replicas.replica_scopes import (
    ReplicaContexts,
    outside_stateless_scope,
    replica_scope,
)
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps.metric_states import adds_up, leaf_metrics, unadded_metrics
from ktrainer.steps.step_context import StepContext


@contextmanager
def metrics_of_replicas(
    model: keras.Model,
    contexts: ReplicaContexts,
    entered: Mapping[int, StepContext],
    each: Callable[[Any], list[Any]],
) -> Iterator[None]:
    """Update metrics that do not add up with each replica's outputs, one replica after another;
    note which ones an eager step resets.

    Args:
        entered: the context of each replica, by its number in this process.
        each: makes of nested per-replica values one structure per replica.
    """
    with ExitStack() as stack:
        for metric in unadded_metrics(model):
            update = _one_after_another(metric.update_state, contexts, entered, each)
            reset = _once(metric.reset_state, contexts)
            stack.enter_context(
                replaced((metric, "update_state", update), (metric, "reset_state", reset))
            )
        for metric in leaf_metrics(model) if tf.executing_eagerly() else []:
            if adds_up(metric):
                stack.enter_context(replaced((metric, "reset_state", _noting_reset(metric))))
        yield


def _once(reset: Callable[[], None], contexts: ReplicaContexts) -> Callable[[], None]:
    """A metric's `reset_state`, once for all replicas."""

    def reset_once() -> None:
        if tf.distribute.in_cross_replica_context():  # in the metric's own `update_state`
            reset()
        else:
            contexts.call_once(lambda _: reset(), [])

    return reset_once


def _one_after_another(
    original: Callable[..., Any],
    contexts: ReplicaContexts,
    entered: Mapping[int, StepContext],
    each: Callable[[Any], list[Any]],
) -> Callable[..., Any]:
    """A metric's `update_state` that takes the outputs of all replicas, one by one."""

    @tf.autograph.experimental.do_not_convert
    def for_each(_: Any, args: Any, weights: Any) -> None:
        for number, ((words, named), weight) in enumerate(each((args, weights))):
            with contexts.entered(entered[number]), outside_stateless_scope():
                tf.cond(weight > 0, lambda w=words, n=named: _done(original(*w, **n)), _done)

    def update_state(*words: Any, **named: Any) -> None:
        replica = tf.distribute.get_replica_context()
        replica.merge_call(for_each, args=((words, named), contexts.here.weight))

    return update_state


def _noting_reset(metric: Any) -> Callable[[], None]:
    """A metric's `reset_state`: of a step that runs eagerly it is not known that it assigns
    constants."""
    original = metric.reset_state

    def reset_state() -> None:
        original()
        if (scope := replica_scope()) is not None:
            scope.note_reset(metric.variables)

    return reset_state


def _done(_: Any = None) -> tf.Tensor:
    return tf.constant(0)
