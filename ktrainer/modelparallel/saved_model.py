"""Write the whole of a model that is cut into stages, as a file that plain Keras loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from ktrainer.checkpoint.export.keras_file import whole_on_root, write_file
from ktrainer.errors import CheckpointError, ModelError
from ktrainer.modelparallel.model_call import RUNNER
from ktrainer.modelparallel.state import current
from ktrainer.steps.variable_placement import placement_of


def save_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the whole model atomically, on rank 0. All ranks call this together.

    Args:
        model: was cut into stages.
        path: ends in `.keras`, for a model of Keras' functional API that `keras.models.load_model`
            reads without the script's class and without ktrainer, or in `.weights.h5`, for
            `load_weights` of an unpartitioned model of the same layers.

    Raises:
        ModelError: the model is not cut yet.
        CheckpointError: on every rank, when rank 0 cannot write the file.
    """
    path, world, error = Path(path), current().world, None
    if placement_of(model) is None:
        raise ModelError(
            f"model {model.name!r} has no variables yet: it is cut into stages by its first step. "
            "Save it after that."
        )
    if not path.name.endswith((".keras", ".weights.h5")):
        raise CheckpointError(
            f"{path} does not end in .keras or .weights.h5, the formats that Keras 3 reads"
        )
    with whole_on_root(model) as missing:
        if missing:
            error = f"cannot save the model to {path}: no stage has {', '.join(missing)}"
        elif world.is_root:
            error = _write(model, path)
    error = world.broadcast(error, 0, "saving the model")
    if error is not None:
        raise CheckpointError(error)


def _write(model: Any, path: Path) -> str | None:
    if path.suffix != ".keras":
        return write_file(model, path)
    try:
        graph = vars(model)[RUNNER].planned.graph(False)
        tensors = [graph.tensors[i] for i in graph.inputs]
        made = [keras.Input(tuple(t.shape)[1:], dtype=t.dtype) for t in tensors]
        symbols = keras.tree.pack_sequence_as(graph.input_structure, made)
        whole = keras.Model(symbols, model.call(symbols), name=model.name)
    except Exception as raised:  # of any type: the other ranks wait for an answer
        return (
            f"cannot save the model to {path}: its call cannot be written as a functional model, "
            f"which needs Keras layers and keras.ops instead of TensorFlow's functions: "
            f"{type(raised).__name__}: {raised}. Save {path.stem}.weights.h5 instead."
        )
    return write_file(whole, path)
