"""A trained model as one ordinary Keras file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.callbacks.base import without_collectives
from ktrainer.callbacks.variables import all_variables
from ktrainer.checkpoint.encoding import dtype_named
from ktrainer.errors import CheckpointError
from ktrainer.steps.elsewhere import elsewhere
from ktrainer.steps.placement import Placement, placement_of
from ktrainer.world import World
from ktrainer.world.arrays import stand_in
from ktrainer.world.gather import gather_arrays


def save_model(model: Any, path: str | os.PathLike[str], world: World) -> None:
    """Write `model` to the `.keras` file `path`: by rank 0, whole or not at all.

    All ranks call this together, and return when the file is there. Of a model that is cut into
    stages, rank 0's host memory holds all of it meanwhile.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot write it.
    """
    path = Path(path)
    error = None
    if path.suffix != ".keras":
        error = f"{path} does not end in .keras, which is the format that is written"
    else:
        with whole_on_root(model) as missing:
            if missing:
                error = f"cannot save the model to {path}: no stage has {', '.join(missing)}"
            elif world.is_root:
                error = write_file(model, path)
    error = world.broadcast(error, 0, "saving the model")
    if error is not None:
        raise CheckpointError(error)


@contextmanager
def whole_on_root(model: Any) -> Iterator[list[str]]:
    """While it lasts, all variables of `model` can be read in rank 0. All ranks enter together.

    Yields:
        On rank 0, the names of those that no process has.
    """
    placement = placement_of(model)
    if placement is None or placement.replica != 0:
        yield []
        return
    fetched, missing = _fetch(model, placement)
    try:
        for away, value in fetched:
            away.fetched = value
        yield missing
    finally:
        for away, _ in fetched:
            away.fetched = None


def _fetch(model: Any, placement: Placement) -> tuple[list[tuple[Any, np.ndarray]], list[str]]:
    """On the first stage, the values of variables of other stages, and names that have none."""
    named = dict(all_variables(model))
    wanted = {n: stand_in(v.shape, dtype_named(str(v.dtype))) for n, v in named.items()}
    here = [name for name, variable in named.items() if placement.holds(variable)]
    received = gather_arrays(
        wanted, here, lambda name: named[name].numpy(), placement.model, "the model, to save it"
    )
    if placement.partition != 0:
        return [], []
    fetched = [(elsewhere(named[name]), value) for name, value in received.items()]
    found = [(away, value) for away, value in fetched if away is not None]
    return found, [name for name in named if name not in received and name not in here]


def write_file(model: Any, path: Path) -> str | None:
    """Write `model` to a `.keras` file, or its weights to a `.weights.h5` file, whole or not at
    all; returns what went wrong."""
    ending = ".keras" if path.suffix == ".keras" else ".weights.h5"
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{ending}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with without_collectives():
            (model.save if ending == ".keras" else model.save_weights)(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:  # whatever Keras raises, the other ranks wait for an answer
        with suppress(OSError):  # its folder may be a file
            temporary.unlink(missing_ok=True)
        return f"cannot save the model to {path}: {type(error).__name__}: {error}"
    return None
