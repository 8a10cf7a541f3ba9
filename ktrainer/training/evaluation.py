"""Evaluation and prediction: one pass over a feed with the weights left as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.averaged_weights import swap_back
from ktrainer.callbacks.base import emit, on_rank, overrides
from ktrainer.callbacks.broadcast import broadcast_once
from ktrainer.data import make_feed, require_end
from ktrainer.data.rank_consistency import check_consistency, data_facts
from ktrainer.errors import DataError
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.steps import Program
from ktrainer.steps.metric_reduction import global_results

if TYPE_CHECKING:
    from ktrainer.config import DataConfig
    from ktrainer.data import Feed
    from ktrainer.distributed import World
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.call_arguments import CallArguments
    from ktrainer.training.context import RunContext
    from ktrainer.training.preemption import SignalHandlers


def evaluate(
    program: Program,
    feed: Feed,
    callbacks: keras.callbacks.CallbackList,
    world: Any,
    agree: Callable[[bool], bool] | None = None,
    common_logs: bool = False,
    of_step: bool = False,
) -> dict[str, Any]:
    """Loss and metrics over all of `feed`, over all ranks.

    Args:
        agree: whether any rank wants to stop; all of them call it after each batch.
        common_logs: give callbacks the logs of all ranks after each batch.
        of_step: return the logs of the last step, as Keras does for a single batch.
    """
    agree = agree or (lambda stop: world.any(stop, "stop evaluating"))
    program.build(feed.spec, training=False)
    broadcast_once(program, world, traced=True)
    program.model.stop_evaluating = False
    callbacks.on_test_begin()
    program.finish()  # updates that a failed `fit` may have scheduled
    program.model.reset_metrics()
    counts = MetricCounts()
    local_batches = feed.epoch(0)
    with closing(local_batches):  # type: ignore[type-var]
        for batch, local in enumerate(local_batches):
            program.build(feed.spec, training=False)
            callbacks.on_test_batch_begin(batch)
            counts.logs = program.test(local)
            counts.last = local.examples if program.counts_metrics else 0
            counts.examples += counts.last
            logs = counts.logs
            if common_logs:
                logs = _global_logs(program, world, counts, "test", of_step=True)
            callbacks.on_test_batch_end(batch, logs)
            if agree(bool(program.model.stop_evaluating)):
                break
    if not counts.logs:
        raise DataError(
            "the data to evaluate on has no batches: give arrays with rows, or a dataset that "
            "yields batches"
        )
    counts.logs = program.finish() or counts.logs
    found = _global_logs(program, world, counts, "test", of_step)
    callbacks.on_test_end(found)
    return found


def _global_logs(
    program: Program,
    world: World,
    counts: MetricCounts,
    kind: Literal["train", "test"],
    of_step: bool,
) -> dict[str, Any]:
    """Logs of all ranks, which call this together."""
    return global_results(
        program.model.metrics,
        world,
        logs=counts.logs,
        sources=program.sources(kind),
        examples=counts.examples,
        last_examples=counts.last,
        of_step=of_step,
    )


class Validation:
    """Evaluation in the middle of training.

    Args:
        context: of the call of `fit`.
        state: of the run, with the validation data.
        callbacks: Keras' list of this rank's callbacks.
        signals: what asks the process to end, which interrupts a validation.
    """

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        callbacks: keras.callbacks.CallbackList,
        signals: SignalHandlers,
    ) -> None:
        self._context, self._state = context, state
        self._callbacks, self._signals = callbacks, signals

    def run(self, keep: bool) -> dict[str, Any]:
        """Loss and metrics over all validation data, over all ranks; the names begin with `val_`.

        Args:
            keep: restore the metrics of the epoch so far; done anyway if it ends with an error.
        """
        state, program = self._state, self._state.program
        with state.times.of("compute"):
            program.finish()
        with state.times.of("validation"):
            kept = [(v, v.numpy()) for v in program.model.metrics_variables]
            try:
                logs = self._evaluate()
            except BaseException:
                keep = True
                with suppress(Exception):  # what has been scheduled counts before they are restored
                    program.finish()
                raise
            finally:
                for variable, value in kept if keep else ():
                    variable.assign(value)
        state.progress.validations += 1
        return {f"val_{name}": value for name, value in logs.items()}

    def run_inside_epoch(self) -> None:
        """As `run`, before an epoch's end, which `on_validation_end` hears of."""
        progress = self._state.progress
        progress.validation_due = True  # should it be interrupted
        progress.validated = self.run(keep=True)
        progress.validation_due = False
        logs = dict(progress.validated)  # theirs, as that is what checkpoints keep
        emit(self._callbacks.callbacks, "on_validation_end", progress.step, logs)

    def forget(self) -> None:
        """Continue after one that was interrupted, and for which there is no data now."""
        self._state.progress.validation_due = False
        if self._state.progress.begun:
            swap_back(self._callbacks.callbacks)

    def _evaluate(self) -> dict[str, Any]:
        context, feed = self._context, self._state.validation
        assert feed is not None

        def maximum(values: np.ndarray, what: str) -> np.ndarray:
            return context.world.oob_allreduce(values, "max", what)

        def agree(stop: bool) -> bool:
            (stop,), request = self._signals.agree(maximum, (stop,), "stop evaluating")
            if request is not None:
                raise request
            return stop

        program, common = self._state.program, context.has_common_logs
        return evaluate(program, feed, self._callbacks, context.world, agree, common)


def predict(
    program: Program, feed: Feed, callbacks: keras.callbacks.CallbackList, world: Any
) -> Any:
    """The model's outputs for all of `feed`, in order, on every rank; or for the batches up to the
    one after which a callback of any rank sets `model.stop_predicting`. Callbacks that want a
    batch's outputs get those of all ranks."""
    event = "on_predict_batch_end"  # LambdaCallback keeps functions in the instance
    wanted = any(event in vars(each) or overrides(each, event) for each in callbacks.callbacks)
    wanted = world.size > 1 and world.any(wanted, "callbacks of predict")
    program.model.stop_predicting = False
    callbacks.on_predict_begin()
    batches = []
    local_batches = feed.epoch(0)
    with closing(local_batches):  # type: ignore[type-var]
        for batch, local in enumerate(local_batches):
            callbacks.on_predict_batch_begin(batch)
            batches.append(program.predict(local))
            outputs = _of_all_ranks(batches[-1:], program, world) if wanted else batches[-1]
            callbacks.on_predict_batch_end(batch, {"outputs": outputs})
            if world.any(bool(program.model.stop_predicting), "stop predicting"):
                break
    callbacks.on_predict_end()
    return _of_all_ranks(batches, program, world)


def _of_all_ranks(batches: list[Any], program: Program, world: World) -> Any:
    """The outputs for batches of which each rank has a part, or all of a pipeline's last stage."""
    mine = batches if program.counts_metrics else None
    ranks = [each for each in world.allgather(mine, "outputs of predict") if each is not None]
    in_order = [part for parts in zip(*ranks, strict=True) for part in parts]
    if not in_order:
        raise DataError("predict was given no data: x has no rows")
    return keras.tree.map_structure(_joined, *in_order)


def _joined(*parts: Any) -> Any:
    """The rows of several outputs, as Keras gives them: ragged if one is."""
    ragged = any(isinstance(part, tf.RaggedTensor) for part in parts)
    return tf.concat(parts, axis=0) if ragged else np.concatenate(parts, axis=0)


def logs_so_far(state: TrainState, world: World, of_step: bool = False) -> dict[str, Any]:
    """Logs of the epoch up to now, of all ranks, which call this together.

    Args:
        of_step: logs that are no metric's are those of the last step.
    """
    counted, program = state.counted, state.program
    with state.times.of("compute"):
        counted.logs = program.finish() or counted.logs
    if state.progress.counted <= 0:
        return {}  # all updates were skipped or undone: that is no loss of 0
    with state.times.of("metrics"):
        return _global_logs(program, world, counted, "train", of_step)


@contextmanager
def opened_pass(
    context: RunContext, model: keras.Model, call: CallArguments, config: DataConfig
) -> Iterator[tuple[Program, Feed, keras.callbacks.CallbackList]]:
    """Context of one pass over a call's data, with the program of the last call if it fits.

    Args:
        config: how the data is read.
    """
    world, check = context.world, context.config.health.check_data
    program = context.program_for(model)
    feed = make_feed(
        call.data,
        world=world,
        config=config,
        training=False,
        check=check,
        device=context.backend.input_device,
        limit=call.batches_per_epoch,
    )
    require_end(feed, "steps=...")
    mine = on_rank(call.callbacks, world.rank)
    callbacks = keras.callbacks.CallbackList(
        mine,
        model=model,
        add_history=False,
        verbose=call.verbose,  # `params` of the callbacks, as in Keras
        epochs=1,
        steps=feed.num_batches,
    )
    try:
        if check and world.size > 1:
            check_consistency(world, data_facts=data_facts(feed, "given"))
        with context.backend.watching():
            yield program, feed, callbacks
    finally:
        feed.close()


def evaluate_call(context: RunContext, model: keras.Model, call: CallArguments) -> dict[str, Any]:
    """Loss and metrics over a call's data, as `evaluate`."""
    world = context.world
    with opened_pass(context, model, call, call.config.data) as (program, feed, callbacks):
        return evaluate(program, feed, callbacks, world, common_logs=context.has_common_logs)


def predict_call(context: RunContext, model: keras.Model, call: CallArguments) -> Any:
    """The outputs for a call's data, as `predict`."""
    # Dealt out, the rows would come back in another order.
    config = replace(call.config.data, shard="batch", batch="global")
    with opened_pass(context, model, call, config) as (program, feed, callbacks):
        broadcast_once(program, context.world)
        return predict(program, feed, callbacks, context.world)
