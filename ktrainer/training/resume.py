"""The start of a run: from a checkpoint, or with an epoch; the words with which to resume it.

find_start              from `on_train_begin` to where training begins
words_to_resume         at the end, what to add to the command
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ktrainer.callbacks.csv_log import logs_of_keras_kept
from ktrainer.callbacks.learning_rate import LearningRate, plain_optimizers
from ktrainer.checkpoint import resume
from ktrainer.checkpoint.contents.plain_attributes import note_attributes
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.data import restore_position
from ktrainer.distributed.restart_records import run_before
from ktrainer.errors import CheckpointError

if TYPE_CHECKING:
    import keras

    from ktrainer.callbacks.callback_list import CallbackList
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.context import RunContext
    from ktrainer.training.triggers import Triggers


def find_start(
    context: RunContext, state: TrainState, callbacks: CallbackList, triggers: Triggers
) -> tuple[bool, str | None]:
    """Call `on_train_begin`, then set where training begins: `state.progress`. All ranks together.

    Returns:
        Whether that is a checkpoint; and how the call differs from that whose checkpoint it is,
        None if it does not.

    Raises:
        CheckpointError: nothing can be restored, or what there is belongs to another `fit`.
    """
    model, world, start, first = state.model, context.world, state.progress, triggers.initial_epoch
    model.stop_training, model._initial_epoch = False, None
    _skip_to_epoch(state, first)
    with logs_of_keras_kept(callbacks.callbacks):
        callbacks.on_train_begin()
    note_attributes(callbacks.callbacks)
    asked = bool(model.stop_training)  # by a callback: obeyed after the next update
    with state.times.of("checkpoint"):
        of_another_call = _resume_run(context, state, callbacks)
    model.stop_training = asked or bool(model.stop_training)
    resumed, made = state.progress is not start, 0
    if not resumed:  # else a newer backup would skip epochs, with the older weights
        said = int(model._initial_epoch or first)  # by Keras' BackupAndRestore, on rank 0
        before = said, _updates_made(model)
        first, made = world.broadcast(before, what="initial epoch")
    _skip_to_epoch(state, first, made)
    if world.is_root:
        _warn_of_unknown_step(state, callbacks, triggers.max_steps)
    return resumed, of_another_call


def warn_that_nothing_is_trained(
    state: TrainState, epochs: int, of_another_call: str | None
) -> None:
    """Warn where the checkpoint that a run resumes has no updates left, and that may be a mistake.

    Args:
        epochs: of the run, in all.
        of_another_call: as `find_start` returns it.
    """
    if state.feed.exhausted and state.progress.epoch < epochs:
        warnings.warn(
            "the checkpoint was made after its iterator had been read to the end, so nothing "
            "is trained; to read the new iterator, set checkpoint.resume=never or pass "
            f"initial_epoch={state.progress.epoch}",
            stacklevel=5,
        )
    elif of_another_call:
        warnings.warn(
            f"nothing is trained, because {of_another_call}, and it has done all epochs of "
            "this one",
            stacklevel=5,
        )


def _resume_run(
    context: RunContext, state: TrainState, callbacks: keras.callbacks.CallbackList
) -> str | None:
    """Restore what `checkpoint.resume` asks for; all ranks together, after `on_train_begin`.

    Returns:
        How the call differs from that whose checkpoint it is; None if it does not.

    Raises:
        CheckpointError: nothing can be restored, or what there is belongs to another `fit`.
    """
    config, world = context.config, context.world
    # A `fit` inside another is run again, whole, if the outer one resumes from before it.
    if config.trainer.fast_dev_run or state.inside:
        return None
    mode, run = _resume_mode(context, state)
    other = _check_call(context, state, run) if mode == "auto" else None
    progress = resume(
        mode,
        context.checkpoint_dir(state),
        model=state.model,
        world=world,
        callbacks=callbacks.callbacks,
        history=state.model.history,
        feed=state.feed if config.checkpoint.iterators else None,
        counted=state.counted,
        accepts=None if run is None else lambda entry: entry.run == run,
        check=partial(restore_position, state.feed, config),
    )
    if progress is None:
        return None
    state.progress = progress
    state.stopped = world.any(bool(state.model.stop_training), "whether training was stopped")
    if state.validation is not None:
        state.validation.replay_passes(progress.validations)
    if state.stopped and world.is_root:
        warnings.warn(
            "training had been stopped when the checkpoint was made, so no update is made; "
            "checkpoint.resume=never starts afresh",
            stacklevel=4,
        )
    return other


def _check_call(context: RunContext, state: TrainState, run: str | None) -> str | None:
    """Compare this call of `fit` with the one whose checkpoint it would resume; where they differ,
    a sentence that says how.

    Args:
        run: the one whose checkpoints count; None: any.

    Raises:
        CheckpointError: it is what a later `fit` of the script was before, as where the script has
            skipped a part.
    """
    found: tuple[str | None, str | None] = None, None
    if context.world.is_root:
        with suppress(Exception):  # `resume` reports what cannot be read, on all ranks
            found = _other_call(context, state, run)
    other, later = context.world.broadcast(found, 0, "comparison of calls of fit")
    if later is not None:
        raise CheckpointError(f"{other}. {later}")
    return other


def _other_call(
    context: RunContext, state: TrainState, run: str | None
) -> tuple[str | None, str | None]:
    folder, now = context.checkpoint_dir(state), state.call_facts
    names = _differences(_call_of(folder, run), now)
    if not names:
        return None, None
    other = f"this is call {state.fits} of fit in the script, but the checkpoint in {folder} is of "
    other += f"a call that differs from it in {', '.join(names[:4])}"
    for number, path in context.later_fits(state):
        call = _call_of(path)
        if set(names) <= call.keys() and not _differences(call, now):
            here = (
                f"; continue call {number} with checkpoint.resume={path}; if this is call 1, "
                f"but changed, resume it with checkpoint.resume={folder}"
            )
            return other, (
                f"It is what call {number} was before, so the script seems to have skipped a part "
                "this time, such as one whose result is on the disk. Let it make all of its calls "
                f"again{here if state.fits == 1 else ''}; or start afresh with another run.dir"
            )
    return other, None


def _call_of(folder: Path, run: str | None = None) -> Mapping[str, str]:
    """Facts of the call of `fit` that saved the newest checkpoint of a folder."""
    entries = Store(folder).entries()
    good = (e for e in entries if e.problem is None and run in (None, e.run))
    return next((entry.call for entry in good), {})


def _differences(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """Names of different facts, of those that both have: some need several processes."""
    return [name for name in one if name in two and one[name] != two[name]]


def _resume_mode(context: RunContext, state: TrainState) -> tuple[str, str | None]:
    """`checkpoint.resume` as it is for this `fit`, and the run whose checkpoints count, if only
    one's do."""
    mode, world = context.config.checkpoint.resume, context.world
    # An earlier start of the same launch is further than what `resume` names.
    run = world.broadcast(run_before(context.checkpoint_dir(state)), 0, "restart")
    if run is not None:
        return "auto", run
    if state.fits > 1 and mode not in ("auto", "never"):
        if world.is_root:
            warnings.warn(
                f"checkpoint.resume={mode} is where the first call of fit begins; this is "
                f"number {state.fits}, which begins with the model as it is",
                stacklevel=6,
            )
        return "never", None
    return mode, None


def _skip_to_epoch(state: TrainState, epoch: int, made: int = 0) -> None:
    """Begin with `epoch`, unless the position is beyond it.

    Args:
        made: updates before it, as far as one knows; used if epochs have no known length.
    """
    progress, steps = state.progress, state.steps_per_epoch
    # The learning rate and `max_steps` go by the step.
    if steps is None and epoch:
        progress.step = max(progress.step, made)
    if epoch > progress.epoch:
        progress.epoch, progress.begun = epoch, False
        progress.step = progress.step if steps is None else epoch * steps


def _updates_made(model: keras.Model) -> int:
    """The updates that the model's first optimizer has made; 0 if it has none."""
    first = next(iter(plain_optimizers(model)), None)
    # Not `iterations`: with `gradient_accumulation_steps` that counts each so many updates.
    return 0 if first is None else int(first._iterations.numpy())


def _warn_of_unknown_step(
    state: TrainState, callbacks: keras.callbacks.CallbackList, max_steps: int | None
) -> None:
    """Warn where training begins with a later epoch than the first, but with step 0, and something
    goes by the step."""
    rates = [c for c in callbacks.callbacks if isinstance(c, LearningRate)]
    warms = any(c.warmup is not None and c.world.nominal_replicas > 1 for c in rates)
    keys = ["lr.warmup"] if warms else []
    keys += ["lr.schedule"] if any(c.schedule for c in rates) else []
    keys += ["trainer.max_steps"] if max_steps is not None else []
    if keys and state.progress.epoch and not state.progress.step:
        warnings.warn(
            f"training begins with epoch {state.progress.epoch + 1}, but {' and '.join(keys)} as "
            "at step 0: the data has no known length, and the optimizer has made no updates. "
            "Restore the optimizer too, or give fit steps_per_epoch.",
            stacklevel=5,
        )


def words_to_resume(context: RunContext, state: TrainState, checkpoint: str | Path) -> str:
    """The `key=value` with which the command of this run resumes from `checkpoint`; empty where
    the same command does, because it names its folder and looks there.

    Args:
        checkpoint: the folder of a checkpoint that this run has saved.
    """
    if context.config.trainer.fast_dev_run:  # it has no folder
        return f"checkpoint.resume={checkpoint}"
    folder = context.checkpoint_dir(state).absolute()
    if Path(checkpoint).absolute().parent == folder:
        begins_there, is_named = _begins_in(folder, context, state), _is_named(context)
        if begins_there and is_named:
            return ""
        if state.fits > 1:  # a path is where the first call of `fit` begins
            words = [] if is_named else [f"run.dir={context.run_dir}"]
            return " ".join([*words, *([] if begins_there else ["checkpoint.resume=auto"])])
    return f"checkpoint.resume={checkpoint}"


def _begins_in(folder: Path, context: RunContext, state: TrainState) -> bool:
    """Whether the run begins with the newest checkpoint of its own folder."""
    mode = context.config.checkpoint.resume
    if mode in ("auto", "never") or state.fits > 1:
        return mode == "auto"
    named = Path(mode).expanduser().absolute()
    return folder in (named, named / "checkpoints")


def _is_named(context: RunContext) -> bool:
    """Whether another start has the same folder of checkpoints."""
    run_dir = context.config.run.dir
    return bool(context.config.checkpoint.dir) or (run_dir is not None and "{time}" not in run_dir)
