"""Go back to the last checkpoint in the middle of a run, and on with the data that come next."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ktrainer.callbacks.base import emit
from ktrainer.checkpoint import resume
from ktrainer.checkpoint.callback import Checkpoint

if TYPE_CHECKING:
    import keras

    from ktrainer.trainer import Trainer


def roll_back(trainer: Trainer, callbacks: keras.callbacks.CallbackList) -> None:
    """Restore the run's last checkpoint, as `trainer.request_rollback` asked for. All ranks
    together, after the same step.

    Weights, optimizers and callbacks, and with them the step, are those of then; the position in
    the data, the epoch, and the time that has gone, are those of now: the batches since are not
    trained on again. The epoch's metrics begin anew. Without a checkpoint of this run, training
    stops.
    """
    reason, trainer.rollback = trainer.rollback, None
    world, model, now = trainer.world, trainer.model, trainer.progress
    assert model is not None
    savers = [c for c in callbacks.callbacks if isinstance(c, Checkpoint)]
    for saver in savers:
        saver.wait()
    saved = [saver.latest() if world.is_root else None for saver in savers]
    found = [(i, entry.run) for i, entry in enumerate(saved) if entry is not None]
    which, run = world.broadcast(found[0] if found else (None, ""), 0, "rollback")
    then = None
    if which is not None:
        then = resume(
            "auto",
            str(savers[which].directory),
            model=model,
            world=world,
            callbacks=callbacks.callbacks,
            history=object(),  # History goes on
            run=run,
            tell=False,  # but below: of the present epoch
        )
    if then is None:
        text = f"{reason}, and there is no checkpoint to go back to: training stops"
        trainer.request_stop(text)
    else:
        text = f"{reason}: back to the checkpoint of step {then.step}, on with the next batch"
        now.step, now.counted, model.stop_training = then.step, 0, False
        model.reset_metrics()
        emit(callbacks.callbacks, "on_restore", now)
        trainer.unsound = False
    if world.is_root:
        warnings.warn(text, stacklevel=4)
