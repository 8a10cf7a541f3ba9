"""A checkpoint as one ordinary Keras file, without the script that trained it.

The model is made from `model.json`, which never runs code of its own; models of the user's own
classes, from a function that the user names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.export import write_file
from ktrainer.checkpoint.foreign import foreign
from ktrainer.checkpoint.format import MODEL
from ktrainer.checkpoint.run_state import read_run
from ktrainer.checkpoint.state import Arrays, pair, variables_of
from ktrainer.errors import CheckpointError
from ktrainer.world import SingleWorld

_REMEDY = (
    "Give the function that makes the model, with --model MODULE:FUNCTION (which runs that "
    "module), or call trainer.save(FILE) in the script."
)


def export(checkpoint: Path, output: Path, function: str | None = None) -> None:
    """Write the model of a checkpoint, from any number of stages, to a Keras file.

    Args:
        checkpoint: its folder; all of it is checked first.
        output: ends in `.keras` (model, weights, and the optimizer where all of it is Keras' own)
            or `.weights.h5` (weights alone).
        function: `MODULE:FUNCTION` that makes the model; None: from the checkpoint alone.

    Raises:
        CheckpointError: the checkpoint is bad, the model is not all Keras' own, or does not fit.
    """
    if not output.name.endswith((".keras", ".weights.h5")):
        raise CheckpointError(f"{output} must end in .keras or .weights.h5")
    arrays, state = read_run(checkpoint)
    whole = output.suffix == ".keras"
    if function is None:
        model = _rebuilt(checkpoint, arrays, state, whole)
    else:
        model = _called(function)
        _fill(model, arrays, state)
        if not whole and model.compiled:
            model.optimizer = None  # it would be among the weights
    problem = write_file(model, output)
    if problem:
        raise CheckpointError(problem)


def _rebuilt(checkpoint: Path, arrays: Arrays, state: Mapping[str, Any], whole: bool) -> Any:
    """The model as `model.json` says; if `whole`, with its optimizer and loss."""
    config = _description(checkpoint)
    compiled = config.pop("compile_config", None)
    found = foreign(config)
    if found:
        raise CheckpointError(
            f"the model in {checkpoint} is not all Keras' own ({', '.join(found)}), so it is not "
            f"made from a file: that could run code. {_REMEDY}"
        )
    if not whole or compiled is None or foreign(compiled):
        return _fill(_made(config, checkpoint), arrays, state)
    try:
        return _fill(_made(config | {"compile_config": compiled}, checkpoint), arrays, state)
    except CheckpointError:  # an optimizer that was changed after `compile`, say
        return _fill(_made(config, checkpoint), arrays, state)


def _description(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MODEL
    if not file.exists():
        raise CheckpointError(f"{checkpoint} does not say how to make its model. {_REMEDY}")
    try:
        config = json.loads(file.read_bytes())
        foreign(config)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not describe a model")
    return config


def _made(config: dict[str, Any], checkpoint: Path) -> Any:
    import keras

    keras.utils.clear_session(free_memory=False)
    try:
        model = keras.saving.deserialize_keras_object(config, safe_mode=True)
    except Exception as error:  # Keras raises all sorts
        raise CheckpointError(
            f"Keras cannot make the model of {checkpoint}: {type(error).__name__}: "
            f"{str(error)[:500]} {_REMEDY}"
        ) from error
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"{checkpoint / MODEL} describes no model, but {type(model)}")
    return model


def _called(function: str) -> Any:
    """What the user's function returns."""
    import keras

    module, _, name = function.partition(":")
    if not name:
        raise CheckpointError(f"--model {function}: write MODULE:FUNCTION, as in train:build_model")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as if the module were the script
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"--model {function}: {error}") from error
    model = make()
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            f"--model {function} returned {type(model).__name__}, which is no keras.Model with "
            "weights; a model that has not been called yet has none: call it once, or give it "
            "an Input"
        )
    return model


def _fill(model: Any, arrays: Arrays, state: Mapping[str, Any]) -> Any:
    """Give `model`, and its optimizer if it is compiled, the values of the checkpoint."""
    if not model.compiled:
        arrays = {n: a for n, a in arrays.items() if not n.startswith("optimizer/")}
        state = {**state, "optimizers": []}
    arrays = _renamed(arrays, [name for name, _ in variables_of(model)])
    for variable, name in pair(model, arrays, state, SingleWorld()):
        variable.assign(arrays[name])
    return model


def _renamed(arrays: Arrays, names: list[str]) -> Arrays:
    """`arrays` by the names of the variables of a model that is made as the saved one was.

    Paths tell where a layer was built, which is not the same in a model that comes from a file:
    only the order, and the last word of each, are.
    """
    saved = [name for name in arrays if name.startswith(("model/", "optimizer/", "seed/"))]
    alike = len(saved) == len(names) and all(map(_alike, saved, names))
    return {new: arrays[old] for old, new in zip(saved, names, strict=True)} if alike else arrays


def _alike(old: str, new: str) -> bool:
    if old.startswith("optimizer/"):
        return old.split(":")[0] == new.split(":")[0]
    words = old.rsplit("/", 1)[-1].split("#")[0], new.rsplit("/", 1)[-1].split("#")[0]
    return words[0] == words[1] and old.split("/")[0] == new.split("/")[0]
