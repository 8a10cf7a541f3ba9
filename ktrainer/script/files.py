"""Files of Keras that are written once: by rank 0, while the others wait."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.callbacks.base import collectives_off, without_collectives
from ktrainer.checkpoint.export import whole_on_root
from ktrainer.errors import CheckpointError
from ktrainer.steps.elsewhere import elsewhere
from ktrainer.steps.optimizers import optimizers_of

if TYPE_CHECKING:
    from ktrainer.script.replace import Replacements
    from ktrainer.trainer import Trainer
    from ktrainer.world import World

_METHODS = ("save", "save_weights", "export")
_OF_A_MODEL = ("save_model", "save_weights")  # of keras.saving


def several(world: World) -> bool:
    """Whether there are other ranks, or may be: a rank that joins has them later."""
    return world.size > 1 or world.heals


def route_files(
    trainer: Trainer,
    replaced: Replacements,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
) -> None:
    """Write files of Keras once, and download once.

    Args:
        borrow: while it lasts, a model that is not cut has all of its variables.
    """
    if not several(trainer.world):
        return
    once = functools.partial(_write_once, trainer, borrow)
    for name in _METHODS:
        replaced.replace(keras.Model, name, once)
    for name in _OF_A_MODEL:
        function = getattr(keras.saving, name, None)
        if function is not None:
            replaced.replace_function(function, once)
    for function in (keras.utils.save_img, keras.utils.plot_model):
        replaced.replace_function(function, once)
    replaced.replace_function(keras.utils.get_file, functools.partial(_root_first, trainer))
    replaced.replace(keras.Model, "load_weights", _load_held)


def _write_once(
    trainer: Trainer,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """`original` by rank 0; the others return when it is done, or raise what it came to."""

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        paths = [a for a in (*args, *kwargs.values()) if isinstance(a, (str, os.PathLike))]
        if collectives_off() or (not paths and original.__name__ != "plot_model"):
            return original(*args, **kwargs)  # into memory, each rank for itself
        model = args[0] if args and isinstance(args[0], keras.Model) else kwargs.get("model")
        error: Exception | None = None
        result = None
        with ExitStack() as stack:
            missing: list[str] = []
            if model is not None:
                stack.enter_context(borrow(model))
                missing = stack.enter_context(whole_on_root(model))
            if missing:
                error = CheckpointError(f"cannot save the model: no stage has {missing}")
            elif trainer.world.is_root:
                try:
                    with without_collectives():
                        result = original(*args, **kwargs)
                except Exception as caught:
                    error = caught
        what = f"{original.__name__} {paths[0] if paths else ''}".strip()
        _raise_alike(trainer, error, what)
        return result

    return write


def _raise_alike(trainer: Trainer, error: Exception | None, what: str) -> None:
    """Raise on all ranks what rank 0 has run into, if anything: a script may catch it."""
    world = trainer.world
    deadline = world.deadline
    # Large files take longer than any other wait for a rank.
    world.deadline = max(deadline, trainer.config.world.start_deadline)
    try:
        told = world.broadcast(error and _portable(error), 0, what)
    finally:
        world.deadline = deadline
    if error is not None:
        raise error
    if told is not None:
        raise told


def _portable(error: Exception) -> Exception:
    """An exception that other processes can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class needs
        return CheckpointError(f"rank 0 failed with {type(error).__name__}: {error}")
    return error


def _root_first(trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` by rank 0, then by the others, who find its file."""

    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        if collectives_off():
            return original(*args, **kwargs)
        world = trainer.world
        result, error = None, None
        if world.is_root:
            try:
                result = original(*args, **kwargs)
            except Exception as caught:
                error = caught
        given = [str(each) for each in (*args, *kwargs.values()) if isinstance(each, str)]
        _raise_alike(trainer, error, f"download by rank 0: {' '.join(given)}")
        return result if world.is_root else original(*args, **kwargs)

    return get


def _load_held(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.load_weights` of a model in stages: each process takes what it holds."""

    @functools.wraps(original)
    def load(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with _remote_ignored(model):
            return original(model, *args, **kwargs)

    return load


@contextmanager
def _remote_ignored(model: keras.Model) -> Iterator[None]:
    """While it lasts, assigning a variable of another stage does nothing."""
    every = [*model.variables, *(v for o in optimizers_of(model) for v in o.variables)]
    remote = [(v, vars(v)["_direct_assign"]) for v in every if elsewhere(v) is not None]
    for variable, _ in remote:
        variable._direct_assign = lambda value: None
    try:
        yield
    finally:
        for variable, refuse in remote:
            variable._direct_assign = refuse
