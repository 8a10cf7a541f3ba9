"""Go back to the last checkpoint in the middle of a run, and on with the data that come next."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ktrainer.checkpoint import resume
from ktrainer.checkpoint.callback import Checkpoint

if TYPE_CHECKING:
    import keras

    from ktrainer.trainer import Trainer


def roll_back(trainer: Trainer, callbacks: keras.callbacks.CallbackList) -> None:
    """Restore the run's last checkpoint, as `trainer.request_rollback` asked for. All ranks
    together, after the same step.

    Weights, optimizers and callbacks, and with them the step, are those of then; the position in
    the data, and the time that has gone, are those of now: the batches since are not trained on
    again. The epoch's metrics begin anew. Without a checkpoint of this run, training stops.
    """
    reason, trainer.rollback = trainer.rollback, None
    world, model, now = trainer.world, trainer.model, trainer.progress
    assert model is not None
    savers = [c for c in callbacks.callbacks if isinstance(c, Checkpoint)]
    for saver in savers:
        saver.wait()
    saver = next((c for c in savers if world.broadcast(_has_saved(c, world), 0, "rollback")), None)
    then = None
    if saver is not None and saver.directory is not None:
        then = resume(
            "auto",
            saver.directory,
            model=model,
            world=world,
            callbacks=callbacks.callbacks,
            history=object(),  # History goes on
        )
    if then is None:
        text = f"{reason}, and there is no checkpoint to go back to: training stops"
        trainer.request_stop(text)
    else:
        text = f"{reason}: back to the checkpoint of step {then.step}, on with the next batch"
        now.step, trainer.unsound, model.stop_training = then.step, False, False
        model.reset_metrics()
    if world.is_root:
        warnings.warn(text, stacklevel=4)


def _has_saved(saver: Checkpoint, world: object) -> bool:
    return bool(getattr(world, "is_root", False)) and saver.latest() is not None
