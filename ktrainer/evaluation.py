"""Evaluation and prediction: one pass over a feed with the weights left as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ktrainer.callbacks.metrics import global_results
from ktrainer.errors import DataError
from ktrainer.steps import Steps

if TYPE_CHECKING:
    from ktrainer.feed import Feed
    from ktrainer.trainer import Trainer


def evaluate(
    program: Steps,
    feed: Feed,
    callbacks: keras.callbacks.CallbackList,
    world: Any,
    agree: Callable[[bool], bool] | None = None,
    common_logs: bool = False,
) -> dict[str, Any]:
    """Loss and metrics over all of `feed`, over all ranks.

    Args:
        agree: whether any rank wants to stop; all of them call it after each batch.
        common_logs: give callbacks the logs of all ranks after each batch.
    """
    agree = agree or (lambda stop: world.any(stop, "stop evaluating"))
    model = program.model
    program.build(feed.spec, training=False)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    program.finish()  # what a `fit` that failed has left
    model.reset_metrics()
    logs: Any = {}
    examples = last = 0

    def results() -> dict[str, Any]:
        return global_results(
            model.metrics,
            world,
            logs=logs,
            examples=examples,
            last_examples=last,
            sources=program.sources("test"),
        )

    shares = feed.epoch(0)
    with closing(shares):  # type: ignore[type-var]
        for batch, share in enumerate(shares):
            program.build(feed.spec, training=False)
            callbacks.on_test_batch_begin(batch)
            logs = program.test(share)
            last = share.examples if program.counts_metrics else 0
            examples += last
            callbacks.on_test_batch_end(batch, results() if common_logs else logs)
            if agree(bool(model.stop_evaluating)):
                break
    if not logs:
        raise DataError(
            "the data to evaluate on has no batches: give arrays with rows, or a dataset that "
            "yields batches"
        )
    logs = program.finish() or logs
    found = results()
    callbacks.on_test_end(found)
    return found


def common_logs(trainer: Trainer) -> bool:
    """Whether callbacks get the logs of all ranks after each batch. Ranks may join."""
    return trainer.config.logging.batch_logs == "all" and trainer.world.size > 1


def validate(
    program: Steps,
    feed: Feed,
    callbacks: keras.callbacks.CallbackList,
    world: Any,
    agree: Callable[[bool], bool],
    keep: bool,
    common_logs: bool = False,
) -> dict[str, Any]:
    """As `evaluate`, in the middle of training: the names begin with `val_`.

    Args:
        agree, common_logs: as for `evaluate`.
        keep: put the metrics of the epoch so far back; done anyway if it ends with an error.
    """
    kept = [(v, v.numpy()) for v in program.model.metrics_variables]
    try:
        logs = evaluate(program, feed, callbacks, world, agree, common_logs)
    except BaseException:
        keep = True
        with suppress(Exception):  # what has been scheduled counts before they are put back
            program.finish()
        raise
    finally:
        for variable, value in kept if keep else ():
            variable.assign(value)
    return {f"val_{name}": value for name, value in logs.items()}


def predict(program: Steps, feed: Feed, callbacks: keras.callbacks.CallbackList, world: Any) -> Any:
    """The model's outputs for all of `feed`, in order, on every rank."""
    callbacks.on_predict_begin()
    batches = []
    shares = feed.epoch(0)
    with closing(shares):  # type: ignore[type-var]
        for batch, share in enumerate(shares):
            callbacks.on_predict_batch_begin(batch)
            batches.append(program.predict(share))
            callbacks.on_predict_batch_end(batch, {"outputs": batches[-1]})
    callbacks.on_predict_end()
    mine = batches if program.counts_metrics else None
    ranks = [each for each in world.allgather(mine, "outputs of predict") if each is not None]
    in_order = [part for parts in zip(*ranks, strict=True) for part in parts]
    if not in_order:
        raise DataError("predict was given no data: x has no rows")
    return keras.tree.map_structure(lambda *parts: _concatenate(parts), *in_order)


def _concatenate(parts: Any) -> Any:
    return np.concatenate(parts, axis=0)


def logs_so_far(trainer: Trainer, program: Steps) -> dict[str, Any]:
    """Logs of the epoch up to now, of all ranks, who call this together."""
    counted = trainer.counted
    counted.logs = program.finish() or counted.logs
    if trainer.progress.counted <= 0:
        return {}  # all updates were left out, or made undone: that is no loss of 0
    return global_results(
        program.model.metrics,
        trainer.world,
        logs=counted.logs,
        sources=program.sources("train"),
        examples=counted.examples,
        last_examples=counted.last,
    )
