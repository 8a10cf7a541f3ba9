"""Adapt callbacks of Keras to several ranks: files are written once, decisions are common."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.callbacks.base import collectives_off, is_writer, without_collectives
from ktrainer.errors import ModelError
from ktrainer.training.call_arguments import callback_list

if TYPE_CHECKING:
    from ktrainer.distributed import World
    from ktrainer.trainer import Trainer

_EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
_BATCH_ENDS = ("on_train_batch_end", "on_test_batch_end", "on_batch_end")
_LOGS = "logging.batch_logs"


def on_ranks(given: Any, trainer: Trainer) -> tuple[list[Any], bool]:
    """The callbacks of a call, and whether they need common logs after each batch. All ranks call
    this together.

    Raises:
        ModelError: ranks hold stages of the model, and some lack a ModelCheckpoint of others.
    """
    callbacks = list(callback_list(given))
    savers = [type(c).__name__ for c in callbacks if _saves(c)]
    mine = savers, any(map(_uses_batch_logs, callbacks)), [_paths(c) for c in callbacks]
    every = trainer.world.allgather(mine, "compare callbacks")
    alike = all(theirs == every[0][0] for theirs, _, _ in every)
    if not alike and trainer.backend.name == "pipeline":
        raise ModelError(
            "ModelCheckpoint is not among the callbacks of every rank, but each rank holds a stage "
            "of the model that it saves: give it to `fit` on all ranks; rank 0 alone writes."
        )
    apart = _written_apart([paths for _, _, paths in every])
    for i, callback in enumerate(callbacks):
        if i in apart:
            callback.on_every_rank = True
        if _saves(callback):
            callback.on_every_rank = alike  # it saves through `Model.save`, which is routed
            _decide_on_root(callback, trainer.world)
        if is_writer(callback):
            _run_alone(callback)
            _warn_of_own_writer(callback, trainer.world)
    return callbacks, any(uses for _, uses, _ in every)


def _warn_of_own_writer(callback: Any, world: World) -> None:
    kind = type(callback)
    if world.is_root and kind.__module__.split(".")[0] != "keras":
        writer = next(c for c in kind.__mro__ if c.__module__.split(".")[0] == "keras")
        warnings.warn(
            f"{kind.__name__} is a {writer.__name__}, and so runs on rank 0 alone: other ranks do "
            "not have what it adds to logs, or changes in the model. If that matters, set "
            "`on_every_rank = True` in it; each rank then writes files of its own.",
            stacklevel=2,
        )


def _paths(callback: Any) -> list[str]:
    """The absolute paths that a callback of Keras writes to."""
    if not isinstance(callback, keras.callbacks.Callback) or not is_writer(callback):
        return []
    given = [v for v in vars(callback).values() if isinstance(v, (str, os.PathLike))]
    return [os.fspath(path) for path in given if os.path.isabs(path)]


def _written_apart(every: list[list[list[str]]]) -> set[int]:
    """The callbacks whose paths differ between ranks, as in temporary folders: each rank runs them,
    since its script may read the files."""
    if len({len(paths) for paths in every}) > 1:
        return set()
    return {
        i for i, paths in enumerate(zip(*every, strict=True)) if any(p != paths[0] for p in paths)
    }


@contextmanager
def common_batch_logs(trainer: Trainer) -> Iterator[None]:
    """Within the block, callbacks get the logs of all ranks after each batch, unless the
    configuration sets that key: a script's decisions are then the same on every rank."""
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


def _uses_batch_logs(callback: Any) -> bool:
    """Return whether the script's own code handles the ends of batches, or whether the logs of a
    batch are written, or decide if and where the model is saved."""
    if _saves(callback) and callback.save_freq != "epoch":
        return True
    if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq != "epoch":
        return True
    given = vars(callback) if isinstance(callback, keras.callbacks.LambdaCallback) else {}
    handlers = [given.get(name) or getattr(type(callback), name, None) for name in _BATCH_ENDS]
    modules = [str(getattr(method, "__module__", "keras")) for method in handlers]
    return any(module.split(".")[0] not in ("keras", "ktrainer") for module in modules)


def _decide_on_root(callback: Any, world: World) -> None:
    """Make a ModelCheckpoint save on every rank when that of rank 0 does: logs of batches differ
    between ranks."""
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
    """Disable collectives in a callback that only rank 0 has or runs."""
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
