"""Write files of Keras once: on rank 0, while the other ranks wait."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import collectives_off, without_collectives
from ktrainer.checkpoint.export.keras_file import whole_on_root
from ktrainer.checkpoint.format.value_encoding import dtype_named
from ktrainer.errors import CheckpointError
from ktrainer.script.shared_folders import WRITTEN
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.remote_variable import is_remote, make_local, make_remote

if TYPE_CHECKING:
    from ktrainer.distributed import World
    from ktrainer.runtime.monkeypatching import Replacements
    from ktrainer.trainer import Trainer

_METHODS = ("save", "save_weights")
_OF_A_MODEL = ("save_model", "save_weights")  # of keras.saving
# Of a tf.train.CheckpointManager: what it knows of its files.
_MANAGED = ("_latest_checkpoint", "_maybe_delete", "_last_preserved_timestamp")


def has_other_ranks(world: World) -> bool:
    """Return whether there are other ranks, or may be later."""
    return world.size > 1 or world.heals


def route_files(
    trainer: Trainer,
    replaced: Replacements,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
) -> None:
    """Write files of Keras and TensorFlow once, and download once.

    Args:
        borrow: a context in which a model that is not cut has all of its variables.
    """
    if not has_other_ranks(trainer.world):
        return
    once = functools.partial(_write_once, trainer, borrow)
    for name in _METHODS:
        replaced.wrap(keras.Model, name, once)
    # A SavedModel takes the variables themselves. TensorFlow may load `tf.saved_model` again, from
    # the module that defines its functions.
    defining = sys.modules[tf.saved_model.save.__module__]
    for owner, name in ((keras.Model, "export"), (tf.saved_model, "save"), (defining, "save")):
        replaced.wrap(owner, name, functools.partial(once, local=True))
    for name in _OF_A_MODEL:
        function = getattr(keras.saving, name, None)
        if function is not None:
            replaced.wrap_function(function, once)
    for function in (keras.utils.save_img, keras.utils.plot_model):
        replaced.wrap_function(function, once)
    replaced.wrap_function(keras.utils.get_file, functools.partial(_root_first, trainer))
    replaced.wrap(tf.data.Dataset, "cache", functools.partial(_cache_of_rank, trainer.world))
    replaced.wrap(keras.Model, "load_weights", _load_by_all)
    replaced.wrap(tf.summary, "create_file_writer", functools.partial(_writer_of_root, trainer))
    if trainer.backend.strategy is None:  # else it writes as its workers must
        save = functools.partial(_save_once, trainer, borrow)
        for name in ("save", "write"):
            replaced.wrap(tf.train.Checkpoint, name, save)
        replaced.wrap(tf.train.CheckpointManager, "save", save)


def _write_once(
    trainer: Trainer,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
    original: Callable[..., Any],
    local: bool = False,
) -> Callable[..., Any]:
    """`original` on rank 0; the others return when it is done, or raise what rank 0 has raised."""

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        paths = [a for a in (*args, *kwargs.values()) if isinstance(a, (str, os.PathLike))]
        if collectives_off() or (not paths and original.__name__ != "plot_model"):
            return original(*args, **kwargs)  # into memory, each rank for itself
        model = args[0] if args and isinstance(args[0], keras.Model) else kwargs.get("model")
        written = os.path.abspath(paths[0]) if paths else None

        def on_root() -> Any:
            refuse_missing()
            with without_collectives():
                return original(*args, **kwargs)

        models = [] if model is None else [model]
        with _whole(trainer, borrow, models, local) as refuse_missing:
            what = f"{original.__name__} {paths[0] if paths else ''}".strip()
            result, written_by_root = _by_root(trainer, what, on_root, written)
        if written is not None:
            sys.audit(WRITTEN, written)
        if written is not None and written != written_by_root:
            _copy(written_by_root, written)
        return result

    return write


def _save_once(
    trainer: Trainer,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """A method of `tf.train.Checkpoint` or its manager that saves: on rank 0, while the others
    wait, and count the checkpoint too. A rank that names another path, as in a temporary folder,
    saves there itself; in a pipeline, where it has a part of the values, it gets rank 0's path."""

    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        manages = isinstance(self, tf.train.CheckpointManager)
        path = self.directory if manages else kwargs.get("file_prefix", (*args, None)[0])
        if collectives_off() or not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        if not isinstance(path, (str, os.PathLike)):  # a tensor
            return original(self, *args, **kwargs)
        path, found = os.path.abspath(path), dict[str, Any]()
        checkpoint = self.checkpoint if manages else self

        def call() -> None:
            with without_collectives():
                found["result"] = original(self, *args, **kwargs)
            if original.__name__ == "save":
                found["count"] = int(checkpoint.save_counter.numpy())
            if manages:
                found["managed"] = {name: vars(self)[name] for name in _MANAGED}

        def on_root() -> None:
            refuse_missing()
            found["path"] = path
            call()

        models = [each for each in vars(checkpoint).values() if isinstance(each, keras.Model)]
        with _whole(trainer, borrow, models, local=True) as refuse_missing:
            what = f"{original.__qualname__} {path}"
            _, of_root = _by_root(trainer, what, on_root, found)
        world, result = trainer.world, of_root["result"]
        # Another host may not see the files of rank 0's.
        lacks = world.local_rank == 0 and result and not os.path.exists(f"{result}.index")
        if (of_root["path"] != path or lacks) and trainer.backend.name != "pipeline":
            call()
            of_root = found
        if not trainer.world.is_root:
            if "count" in of_root:
                checkpoint.save_counter.assign(of_root["count"])
            vars(self).update(of_root.get("managed", {}))
        return of_root["result"]

    return save


@contextmanager
def _whole(
    trainer: Trainer,
    borrow: Callable[[keras.Model], AbstractContextManager[None]],
    models: Iterable[keras.Model],
    local: bool,
) -> Iterator[Callable[[], None]]:
    """Give rank 0 all values of models inside the block; yield a function for it that raises if no
    stage has some.

    Args:
        local: as if it had made them itself.
    """
    missing: list[str] = []

    def refuse_missing() -> None:
        if missing:
            raise CheckpointError(f"cannot save the model: no stage has {missing}")

    with ExitStack() as stack:
        for model in models:
            stack.enter_context(borrow(model))
            missing += stack.enter_context(whole_on_root(model))
            if local and trainer.world.is_root:
                stack.enter_context(_all_local(model))
        yield refuse_missing


def _writer_of_root(trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.summary.create_file_writer`, whose files rank 0 alone writes."""

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        if trainer.world.is_root:
            return original(*args, **kwargs)
        return tf.summary.create_noop_writer()

    return create


def _copy(source: str, target: str) -> None:
    """Copy what rank 0 has written for a rank that names another path, as in a temporary folder."""
    if os.path.isdir(source):
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif os.path.isfile(source):
        shutil.copyfile(source, target)


def _root_first(trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` on rank 0, then on the first rank of each other host that has not the same file,
    while all wait: it unpacks an archive once more each time, over files that others may read. A
    rank that asks for another file than rank 0 calls it, too."""

    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        world = trainer.world
        if collectives_off() or world.alone:  # it joins the others later
            return original(*args, **kwargs)
        asked, found = repr((args, kwargs)), list[Any]()

        def on_root() -> None:
            path = original(*args, **kwargs)
            found.extend((path, asked, _identity(path)))

        what = f"download by rank 0: {asked}"
        _, (path, of_root, identity) = _by_root(trainer, what, on_root, found)
        try:
            if world.local_rank == 0 and _identity(path) != identity:
                path = original(*args, **kwargs)
        finally:  # also if it fails: the others wait
            with _long_deadline(trainer):
                world.barrier(what)
        same = asked == of_root and os.path.exists(path)
        return path if same or world.is_root else original(*args, **kwargs)

    return get


def _identity(path: str) -> tuple[int, ...]:
    """What tells a file, or folder, of a shared disk from one of the same path."""
    if not os.path.exists(path):
        return ()
    facts = os.stat(path)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _cache_of_rank(world: World, original: Callable[..., Any]) -> Callable[..., Any]:
    """`Dataset.cache` with a file of its own for each rank: TensorFlow lets one write."""

    @functools.wraps(original)
    def cache(self: Any, filename: Any = "", name: Any = None) -> Any:
        if isinstance(filename, (str, os.PathLike)) and os.fspath(filename):
            filename = f"{os.fspath(filename)}-rank{world.stable_rank}-of-{world.size}"
        return original(self, filename, name)

    return cache


def _by_root(
    trainer: Trainer, what: str, call: Callable[[], Any], fact: Any = None
) -> tuple[Any, Any]:
    """Run `call` on rank 0 while the others wait. All ranks raise what it raises: a script may
    catch it.

    Returns:
        On rank 0 the result, elsewhere None; and rank 0's `fact`.
    """
    world = trainer.world
    result: Any = None
    error: Exception | None = None
    if world.is_root:
        try:
            result = call()
        except Exception as caught:
            error = caught
    with _long_deadline(trainer):
        received, fact = world.broadcast((error and _portable(error), fact), 0, what)
    if error is not None or received is not None:
        raise error or received
    return result, fact


@contextmanager
def _long_deadline(trainer: Trainer) -> Iterator[None]:
    """Within the block ranks wait for longer: large files take longer than any other wait."""
    world = trainer.world
    deadline = world.deadline
    world.deadline = max(deadline, trainer.config.world.start_deadline)
    try:
        yield
    finally:
        world.deadline = deadline


def _portable(error: Exception) -> Exception:
    """An exception that can be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its constructor may need anything
        return CheckpointError(f"rank 0 failed with {type(error).__name__}: {error}")
    return error


def _load_by_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Model.load_weights` of a model in stages: each process reads the whole file, since layers
    may compute constants from it, and keeps what it held."""

    @functools.wraps(original)
    def load(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with _all_local(model):
            return original(model, *args, **kwargs)

    return load


@contextmanager
def _all_local(model: keras.Model) -> Iterator[None]:
    """Within the block, variables of other stages are true ones, with the values that have been
    fetched, else zeros."""
    every = [*model.variables, *(v for o in optimizers_of(model) for v in o.variables)]
    remote = [(v, place) for v in every if (place := is_remote(v)) is not None]
    try:
        for variable, place in remote:
            zeros = np.zeros(variable.shape, dtype_named(str(variable.dtype)))
            make_local(variable, zeros if place.fetched is None else place.fetched)
        yield
    finally:
        for variable, place in remote:
            if is_remote(variable) is None:
                make_remote(variable, place.partition)
