"""Return to the last checkpoint in the middle of a run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ktrainer.callbacks.averaged_weights import swap_back
from ktrainer.callbacks.base import emit
from ktrainer.checkpoint import resume
from ktrainer.checkpoint.checkpoint_callback import Checkpoint

if TYPE_CHECKING:
    import keras

    from ktrainer.distributed import World
    from ktrainer.state.progress import Progress
    from ktrainer.state.train_state import TrainState


def roll_back(state: TrainState, world: World, callbacks: keras.callbacks.CallbackList) -> None:
    """Restore the run's last checkpoint, as `request_rollback` asked for. All ranks together,
    after the same step.

    Weights, optimizers and callbacks, and with them the step, are those of the checkpoint; the
    position in the data, the epoch, and the time spent, are those of now: the batches since are
    not trained on again. The epoch's metrics start over. Without a checkpoint of this run, training
    stops.
    """
    # Updates of the old weights that still run would change the restored ones.
    state.program.finish()
    state.program.abandon()
    reason, model, now = state.rollback, state.model, state.progress
    then = _restore_last(model, world, callbacks)
    if then is None:
        text = f"{reason}, and there is no checkpoint to go back to: training stops"
        state.request_stop(text)
    else:
        text = f"{reason}: back to the checkpoint of step {then.step}, on with the next batch"
        now.step, now.counted, model.stop_training = then.step, 0, False
        model.reset_metrics()
        swap_back(callbacks.callbacks)  # the checkpoint may be of an epoch's end, and this is none
        emit(callbacks.callbacks, "on_restore", now)
        state.update_invalid = False
    state.rollback = None
    state.counted.examples = 0  # as the metrics, which start over
    if world.is_root:
        warnings.warn(text, stacklevel=4)


def _restore_last(
    model: Any, world: World, callbacks: keras.callbacks.CallbackList
) -> Progress | None:
    """Restore the newest checkpoint of this run; None if there is none."""
    savers = [c for c in callbacks.callbacks if isinstance(c, Checkpoint)]
    for saver in savers:
        saver.wait()
    saved = (i for i, s in enumerate(savers) if world.is_root and s.latest() is not None)
    which = world.broadcast(next(saved, None), 0, "rollback")
    if which is None:
        return None
    return resume(
        "auto",
        str(savers[which].directory),
        model=model,
        world=world,
        callbacks=callbacks.callbacks,
        history=object(),  # History keeps its epochs
        accepts=savers[which].is_in_history,
        rollback=True,
    )
