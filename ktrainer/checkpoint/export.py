"""A trained model as one ordinary Keras file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ktrainer.errors import CheckpointError
from ktrainer.world import World


def save_model(model: Any, path: str | os.PathLike[str], world: World) -> None:
    """Write `model` to the `.keras` file `path`: by rank 0, whole or not at all.

    All ranks call this together, and return when the file is there.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot write it.
    """
    path = Path(path)
    error = None
    if path.suffix != ".keras":
        error = f"{path} does not end in .keras, which is the format that is written"
    elif world.is_root:
        error = _write(model, path)
    error = world.broadcast(error, 0, "saving the model")
    if error is not None:
        raise CheckpointError(error)


def _write(model: Any, path: Path) -> str | None:
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}.keras")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:  # whatever Keras raises, the other ranks wait for an answer
        temporary.unlink(missing_ok=True)
        return f"cannot save the model to {path}: {type(error).__name__}: {error}"
    return None
