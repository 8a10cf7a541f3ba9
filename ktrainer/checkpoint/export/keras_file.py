"""Save a trained model as one ordinary Keras file, also for `ModelCheckpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ktrainer.callbacks.base import without_collectives
from ktrainer.checkpoint.format.value_encoding import dtype_named
from ktrainer.distributed import World, current_world
from ktrainer.distributed.array_transfer import gather_arrays, placeholder
from ktrainer.errors import CheckpointError, ConfigError
from ktrainer.steps.named_variables import all_variables
from ktrainer.steps.remote_variable import is_remote
from ktrainer.steps.variable_placement import Placement, placement_of


def save_model(model: Any, path: str | os.PathLike[str], world: World) -> None:
    """Write `model` to the `.keras` file `path` atomically, on rank 0.

    All ranks call this together, and return when the file is complete. Of a model that is cut into
    stages, rank 0's host memory holds all weights meanwhile.

    Raises:
        CheckpointError: on every rank, for another ending, or when rank 0 cannot write it.
    """
    if not os.fspath(path).endswith(".keras"):
        raise CheckpointError(
            f"{path} does not end in .keras, the only format that trainer.save writes: give it "
            "NAME.keras. For weights alone, `ktrainer checkpoint export RUN NAME.weights.h5`; or, "
            "but for a pipeline, model.save_weights under `if trainer.world.is_root:`."
        )
    write_keras_file(model, path, world)


def write_keras_file(
    model: Any,
    path: str | os.PathLike[str],
    world: World,
    write: Callable[[Any, Path], str | None] | None = None,
) -> None:
    """Write `model`, or its weights where `path` ends in `.weights.h5`; as `save_model`.

    Args:
        write: writes it on rank 0, where all weights are, and returns an error; None: `write_file`.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(f"{path} is not on a local file system: save locally, then copy it")
    path, error = Path(path), None
    with whole_on_root(model) as missing:
        if missing:
            error = f"cannot save the model to {path}: no stage has {', '.join(missing)}"
        elif world.is_root:
            error = (write or write_file)(model, path)
    error = world.broadcast(error, 0, "saving the model")
    if error is not None:
        raise CheckpointError(error)


def save_checkpoints_on_all_ranks(callbacks: Iterable[Any]) -> None:
    """Run each `ModelCheckpoint` on all ranks, which bring the model together where it saves."""
    for callback in callbacks:
        is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
        if is_checkpoint and not getattr(callback, "on_every_rank", False):
            if type(callback)._save_model is not keras.callbacks.ModelCheckpoint._save_model:
                raise ConfigError(
                    f"{type(callback).__name__} has a _save_model of its own, which would save one "
                    "stage of the pipeline: use keras.callbacks.ModelCheckpoint itself, or "
                    "checkpoint.every and trainer.save"
                )
            callback.on_every_rank = True
            callback._save_model = partial(_save_model, callback)


def _save_model(callback: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """As `ModelCheckpoint._save_model`, on all ranks together.

    Raises:
        CheckpointError: on all ranks, when rank 0 cannot write the file.
    """
    world, path, saves, error = current_world(), "", False, None
    if world.is_root:
        try:
            path = callback._get_file_path(epoch, batch, logs)
            with without_collectives():
                saves = bool(callback._should_save_model(epoch, batch, logs, path))
        except Exception as raised:  # the other ranks wait for the answer
            error = f"ModelCheckpoint cannot say whether to save: {type(raised).__name__}: {raised}"
    best = None if callback.best is None else float(callback.best)
    path, saves, callback.best, error = world.broadcast(
        (path, saves, best, error), 0, "whether to save the model"
    )
    if error is not None:
        raise CheckpointError(error)
    if saves:
        write_keras_file(callback.model, path, world)
        if callback.verbose > 0 and world.is_root:
            print(f"\nEpoch {epoch + 1}: finished saving model to {path}")


@contextmanager
def whole_on_root(model: Any) -> Iterator[list[str]]:
    """Make all variables of `model` readable on rank 0. All ranks enter together.

    Yields:
        On rank 0, the names of variables that no process holds.
    """
    placement = placement_of(model)
    if placement is None or placement.replica != 0:
        yield []
        return
    fetched, missing = _fetch(model, placement)
    try:
        for remote, value in fetched:
            remote.fetched = value
        yield missing
    finally:
        for remote, _ in fetched:
            remote.fetched = None


def _fetch(model: Any, placement: Placement) -> tuple[list[tuple[Any, np.ndarray]], list[str]]:
    """On the first stage: the values of variables of other stages, and names without a value."""
    named = dict(all_variables(model))
    wanted = {n: placeholder(v.shape, dtype_named(str(v.dtype))) for n, v in named.items()}
    here = [name for name, variable in named.items() if placement.holds(variable)]
    received = gather_arrays(
        wanted, here, lambda name: named[name].numpy(), placement.model, "the model, to save it"
    )
    if placement.partition != 0:
        return [], []
    fetched = [(is_remote(named[name]), value) for name, value in received.items()]
    found = [(remote, value) for remote, value in fetched if remote is not None]
    return found, [name for name in named if name not in received and name not in here]


def write_file(model: Any, path: Path) -> str | None:
    """Write `model` (`.keras`, `.h5`) or its weights (`.weights.h5`) atomically; return an error or
    None."""
    weights_only = path.name.endswith(".weights.h5")
    ending = ".weights.h5" if weights_only else path.suffix
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{ending}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with without_collectives():
            (model.save_weights if weights_only else model.save)(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:  # of any type: the other ranks wait for an answer
        with suppress(OSError):  # its folder may be a file
            temporary.unlink(missing_ok=True)
        return f"cannot save the model to {path}: {type(error).__name__}: {error}"
    return None
