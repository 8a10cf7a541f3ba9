"""Resume a run: rank 0 reads and verifies a checkpoint, each rank restores what it holds.

`resume` is called once the model and its optimizers are built, right after `on_train_begin`, where
Keras' callbacks reset their state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.data_state import Data
from ktrainer.checkpoint.contents.local_state import arrays_of_rank, check_ranks, name_of_rank
from ktrainer.checkpoint.contents.powersgd_state import deal_errors
from ktrainer.checkpoint.contents.restore_state import (
    assign_state,
    needed_arrays,
    pair_attributes,
    pair_variables,
    vocabulary_problems,
)
from ktrainer.checkpoint.contents.validate_state import read_run
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.checkpoint.format.checkpoint_store import Entry, Store
from ktrainer.checkpoint.format.value_encoding import dtype_named
from ktrainer.distributed import World
from ktrainer.distributed.array_transfer import broadcast_chosen, placeholder
from ktrainer.errors import CheckpointError
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Progress


def resume(
    mode: str,
    directory: str | os.PathLike[str],
    *,
    model: Any,
    world: World,
    callbacks: Iterable[Any] = (),
    history: Any = None,
    feed: Data | None = None,
    counted: MetricCounts | None = None,
    accepts: Callable[[Entry], bool] | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    rollback: bool = False,
) -> Progress | None:
    """Restore a run on all ranks, which call this together.

    Args:
        mode: `auto`: the latest good checkpoint in `directory`, or none if there is none; `never`:
            none; otherwise the path of a checkpoint, or of a folder of checkpoints.
        directory: the run's checkpoints.
        model: built, with its optimizers compiled.
        callbacks: callbacks whose states are restored.
        history: a `keras.callbacks.History` to fill; default: the one attached to the model.
        feed: the data whose position is restored; None leaves it unchanged.
        counted: the metric counts of this rank, to be restored.
        accepts: with `auto`, whether a readable checkpoint may be restored; None: each may.
        check: called with the state before anything is changed; raises, on all ranks alike, if
            it does not fit.
        rollback: leave plain attributes of users' callbacks as they are, and `on_restore` to the
            caller.

    Returns:
        The position to resume from; None for a fresh start.

    Raises:
        CheckpointError: every checkpoint, or the requested one, is damaged or does not fit the
            model or the data. Never a silent fresh start.
    """
    if mode == "never":
        return None
    arrays, state = _read_on_root(mode, Path(directory), world, accepts)
    if state is None:
        return None
    if check is not None:
        check(state)
    check_ranks(state, world)
    problems = vocabulary_problems(model, state)  # on all ranks: if this fails, it does on all
    for problem in problems if world.is_root else ():
        warnings.warn(f"{problem}. Adapt the layer to the same data as then", stacklevel=3)
    arrays = deal_errors(arrays, state, world.size) if world.is_root else arrays
    callbacks = list(callbacks)
    saved = _specs(arrays, world)
    mine = arrays_of_rank(saved, state, world.rank)
    pairs = pair_variables(model, mine, state, world) + pair_attributes(model, mine, world)
    needed = needed_arrays(model, pairs, mine, state, world)
    keep = {name_of_rank(name, state, world.rank) for name in needed}
    arrays = broadcast_chosen(arrays or saved, keep, world, 0, "arrays of a checkpoint")
    arrays = arrays_of_rank(arrays, state, world.rank)
    progress = assign_state(
        model,
        pairs,
        arrays,
        state,
        world,
        callbacks=callbacks,
        feed=feed,
        counted=counted,
        attributes=not rollback,
    )
    fill_history(history if history is not None else getattr(model, "history", None), state)
    if not rollback:
        from ktrainer.callbacks.base import emit

        emit(callbacks, "on_restore", progress)
    return progress


def _read_on_root(
    mode: str, directory: Path, world: World, accepts: Callable[[Entry], bool] | None
) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
    arrays: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {"state": None, "error": None}
    cause: Exception | None = None
    if world.is_root:
        try:
            chosen = _latest_good(directory, accepts) if mode == "auto" else _asked_for(Path(mode))
            if chosen is not None:
                arrays, found["state"] = chosen
        except CheckpointError as error:
            found["error"] = str(error)
        except Exception as error:  # of any type: the other ranks wait for an answer
            where, what, cause = directory if mode == "auto" else mode, type(error).__name__, error
            found["error"] = f"no checkpoint can be read in {where}: {what}: {error}"
    found = world.broadcast(found, 0, "state of a checkpoint")
    if found["error"]:
        raise CheckpointError(found["error"]) from cause
    return arrays, found["state"]


def _asked_for(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    path = path.expanduser()
    if (path / MANIFEST).exists():
        return read_run(path)
    for folder in (path, path / "checkpoints"):
        latest = _latest_good(folder)
        if latest is not None:
            return latest
    raise CheckpointError(
        f"checkpoint.resume={path}: there is no checkpoint. Give the folder of one (with a "
        f"{MANIFEST}), or of a run, or auto or never."
    )


def _latest_good(
    directory: Path, accepts: Callable[[Entry], bool] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    problems = []
    for entry in Store(directory).entries():
        if accepts is not None and entry.problem is None and not accepts(entry):
            continue  # a checkpoint without a readable manifest may be one of them
        try:
            return read_run(entry.path)
        except CheckpointError as error:
            problems.append(str(error))
            warnings.warn(f"{error}; trying the one before", stacklevel=4)
    if problems:
        raise CheckpointError(
            f"all {len(problems)} checkpoints in {directory} are damaged:\n  "
            + "\n  ".join(problems)
            + "\nTo start from scratch, set checkpoint.resume=never."
        )
    return None


def _specs(arrays: dict[str, np.ndarray], world: World) -> dict[str, np.ndarray]:
    """Placeholders with the shapes and dtypes of rank 0's arrays, on every rank."""
    specs = [(name, array.shape, array.dtype.name) for name, array in arrays.items()]
    specs = world.broadcast(specs, 0, "names in a checkpoint")
    return {name: placeholder(shape, dtype_named(dtype)) for name, shape, dtype in specs}


def fill_history(history: Any, state: dict[str, Any]) -> None:
    """Fill a `keras.callbacks.History` from `state["history"]`; do nothing for anything else."""
    saved = state.get("history") or {}
    if history is None or not hasattr(history, "history"):
        return
    history.epoch = list(saved.get("epoch", []))
    history.history.clear()
    history.history.update({k: list(v) for k, v in saved.get("history", {}).items()})
