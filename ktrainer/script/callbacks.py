"""Callbacks of Keras in a call of several ranks: files are written once, and all decide alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.arguments import callback_list
from ktrainer.callbacks.base import collectives_off, is_writer, without_collectives
from ktrainer.errors import ModelError

if TYPE_CHECKING:
    from ktrainer.trainer import Trainer
    from ktrainer.world import World

_EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
_BATCH_ENDS = ("on_train_batch_end", "on_test_batch_end", "on_batch_end")
_LOGS = "logging.batch_logs"


def on_ranks(given: Any, trainer: Trainer) -> tuple[list[Any], bool]:
    """The callbacks of a call, and whether they are to get common logs after each batch. All ranks
    call this together.

    Raises:
        ModelError: ranks hold stages of the model, and some lack a ModelCheckpoint of others.
    """
    callbacks = list(callback_list(given))
    savers = [type(c).__name__ for c in callbacks if _saves(c)]
    mine = savers, any(map(_hears_batches, callbacks))
    every = trainer.world.allgather(mine, "compare callbacks")
    alike = all(theirs == every[0][0] for theirs, _ in every)
    if not alike and trainer.backend.name == "pipeline":
        raise ModelError(
            "ModelCheckpoint is not among the callbacks of every rank, but each rank holds a stage "
            "of the model that it saves: give it to `fit` on all ranks; rank 0 alone writes."
        )
    for callback in callbacks:
        if _saves(callback):
            callback.on_every_rank = alike  # it saves through `Model.save`, which is routed
            _decide_on_root(callback, trainer.world)
        if is_writer(callback):
            _run_alone(callback)
    return callbacks, any(hears for _, hears in every)


@contextmanager
def common_batch_logs(trainer: Trainer) -> Iterator[None]:
    """While it lasts, callbacks get the logs of all ranks after each batch, unless the command line
    or a file says otherwise: what a script decides on them is the same on every rank."""
    kept = trainer.config, trainer._config
    if trainer._config.origin(_LOGS) is None:
        trainer.config, trainer._config = (
            config.with_changes(logging=replace(config.logging, batch_logs="all"))
            for config in kept
        )
    try:
        yield
    finally:
        trainer.config, trainer._config = kept


def _saves(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.ModelCheckpoint)


def _hears_batches(callback: Any) -> bool:
    """Whether code of the script's own hears of the end of batches, or the logs of one say whether
    and where the model is saved."""
    if _saves(callback) and callback.save_freq != "epoch":
        return True
    given = vars(callback) if isinstance(callback, keras.callbacks.LambdaCallback) else {}
    heard = [given.get(name) or getattr(type(callback), name, None) for name in _BATCH_ENDS]
    modules = [str(getattr(method, "__module__", "keras")) for method in heard]
    return any(module.split(".")[0] not in ("keras", "ktrainer") for module in modules)


def _decide_on_root(callback: Any, world: World) -> None:
    """Have a ModelCheckpoint of every rank save when that of rank 0 does: logs of batches are each
    rank's own."""
    original = callback._should_save_model
    if hasattr(original, "_by_root"):
        return

    @functools.wraps(original)
    def should_save(*args: Any, **kwargs: Any) -> bool:
        saves = original(*args, **kwargs)
        if collectives_off():
            return bool(saves)
        best = None if callback.best is None else float(callback.best)
        saves, callback.best = world.broadcast((bool(saves), best), 0, "whether to save the model")
        return bool(saves)

    should_save._by_root = True  # type: ignore[attr-defined]
    callback._should_save_model = should_save


def _run_alone(callback: Any) -> None:
    """Run a callback that rank 0 alone has, or runs, without collectives."""
    for name in _EVENTS:
        method = getattr(callback, name)
        if not hasattr(method, "_alone"):
            setattr(callback, name, _without_collectives(callback, method))


def _without_collectives(callback: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_writer(callback):  # on every rank, in a later call
            return method(*args, **kwargs)
        with without_collectives():
            return method(*args, **kwargs)

    called._alone = True  # type: ignore[attr-defined]
    return called
