"""Export a checkpoint as one ordinary Keras file, without the script that trained it.

The model is built from `model.json`, which never runs code of its own; models with the user's own
classes, by a function that the user names.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.contents.capture_state import Arrays, named_variables
from ktrainer.checkpoint.contents.local_state import arrays_of_rank
from ktrainer.checkpoint.contents.restore_state import (
    COUNTER,
    kinds_of_arrays,
    pair_variables,
    reordered,
    vocabulary_problems,
)
from ktrainer.checkpoint.contents.validate_state import read_run
from ktrainer.checkpoint.export.keras_file import write_file
from ktrainer.checkpoint.format.checkpoint_folder import MODEL
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from ktrainer.steps.named_variables import lookup_layers

_REMEDY = (
    "Give the function that builds the model, with --model MODULE:FUNCTION (which runs that "
    "module), or call trainer.save(NAME.keras) in the script."
)

# Keras' safe mode refuses Lambda layers, but imports any module that a description names. Here only
# classes and functions that Keras has for building models pass; nothing is imported for others.
# Values that Keras writes as objects.
_VALUES = ("__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__")
_KINDS = "activations|constraints|initializers|losses|metrics|optimizers|regularizers"
_FUNCTIONS = re.compile(rf"keras\.({_KINDS})")
_CLASSES = re.compile(
    rf"keras\.({_KINDS}|optimizers\.schedules|layers|models|dtype_policies|random)"
    r"|keras\.src\.(models\.(functional|sequential)|ops\.\w+|dtype_policies\.\w+)"
)
_TOP = ("Sequential", "DTypePolicy", "DTypePolicyMap", "Variable", "KerasTensor")
# They run code, or open files, that their configuration names.
_DANGEROUS = ("Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")


def export_model(
    checkpoint: Path, output: Path, function: str | None = None, as_validated: bool = False
) -> bool:
    """Write the model of a checkpoint, from any number of stages, to a Keras file; local layers as
    rank 0 has them. Averages that the optimizer keeps (`use_ema`) take the place of weights, as at
    the end of training; return whether there are some.

    Args:
        checkpoint: its folder; all of it is checked first.
        output: ends in `.keras` (model, weights, and the optimizer where all of it is Keras' own)
            or `.weights.h5` (weights alone).
        function: `MODULE:FUNCTION` that builds the model; None: from the checkpoint alone.
        as_validated: no averages, unless Keras' SwapEMAWeights had them validated.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model, or the model has
            classes that are not Keras' own.
    """
    if not output.name.endswith((".keras", ".weights.h5")):
        raise CheckpointError(f"{output} must end in .keras or .weights.h5")
    arrays, state = read_run(checkpoint)
    arrays, state = arrays_of_rank(arrays, state, 0), {**state, "local": []}
    in_place, swaps = _swapped(state)
    raw = in_place or (as_validated and not swaps)
    averages = {} if raw else _averages(arrays, state)
    arrays |= {name: arrays[average] for name, average in averages.items()}
    whole = output.suffix == ".keras"
    if function is None:
        model = _rebuilt(checkpoint, arrays, state, whole)
    else:
        model = model_of_function(function)
        _fill(model, arrays, state, whole, of_function=True)
        if not whole and model.compiled:
            model.optimizer = None  # it would be among the weights
    problem = write_file(model, output)
    if problem:
        raise CheckpointError(problem)
    return bool(averages)


def _swapped(state: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether Keras' SwapEMAWeights had put averages into the model, and whether there was one."""
    attributes = [saved.get("attributes", {}) for saved in state.get("callbacks", ())]
    key = "_ema_weights_in_model"
    return any(each.get(key) for each in attributes), any(key in each for each in attributes)


def _averages(arrays: Arrays, state: Mapping[str, Any]) -> dict[str, str]:
    """The names of weights, and those of the averages that the compiled optimizer keeps of them."""
    names, optimizers = [n for n in arrays if n.startswith("model/")], state.get("optimizers", ())
    found = {}
    for i, facts in enumerate(optimizers):
        # Earlier versions saved neither.
        if not facts.get("compiled", len(optimizers) == 1) or not facts.get("averages", True):
            continue
        slots = [name for name in arrays if name.startswith(f"optimizer/{i}/")]
        for name in (names[place] for place in facts["variables"] if place < len(names)):
            path = name.removeprefix("model/").split("#")[0].replace("/", "_")
            own = (each for each in slots if each.partition(":")[2] == f"{path}_average")
            if slot := next(own, None):
                slots.remove(slot)
                found[name] = slot
    return found


def _rebuilt(checkpoint: Path, arrays: Arrays, state: Mapping[str, Any], whole: bool) -> Any:
    """The model as `model.json` says; if `whole`, with its optimizer and loss."""
    config = _description(checkpoint)
    compiled = config.pop("compile_config", None)
    found = untrusted_objects(config)
    if found:
        raise CheckpointError(
            f"the model in {checkpoint} is not all Keras' own ({', '.join(found)}), so it is not "
            f"built from a file: that could run code. {_REMEDY}"
        )
    if not whole or compiled is None or untrusted_objects(compiled):
        return _fill(_made(config, checkpoint), arrays, state, whole)
    try:
        return _fill(_made(config | {"compile_config": compiled}, checkpoint), arrays, state, whole)
    except CheckpointError:  # an optimizer that was changed after `compile`, say
        return _fill(_made(config, checkpoint), arrays, state, whole)


def _description(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MODEL
    if not file.exists():
        raise CheckpointError(f"{checkpoint} has no description of its model. {_REMEDY}")
    try:
        config = json.loads(file.read_bytes())
        untrusted_objects(config)
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
            f"Keras cannot build the model of {checkpoint}: {type(error).__name__}: "
            f"{str(error)[:500]} {_REMEDY}"
        ) from error
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"{checkpoint / MODEL} describes no model, but {type(model)}")
    return model


def model_of_function(function: str) -> Any:
    """The model that the user's function returns."""
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
            "weights; a subclassed model has none before it is called: call it once, or give it an "
            "Input"
        )
    return model


def _fill(
    model: Any, arrays: Arrays, state: Mapping[str, Any], whole: bool, of_function: bool = False
) -> Any:
    """Assign the values of the checkpoint to `model`, and to its optimizer if it is compiled.

    Args:
        whole: whether its optimizer is written, too.
        of_function: a function has built it, which may list its layers in another order.
    """
    _check_vocabularies(model, state, of_function)
    optimizers = whole and model.compiled
    kinds = kinds_of_arrays(optimizers)
    names = [name for name, _ in named_variables(model) if name.startswith(kinds)]
    of_loop = _state_of_loop(state, arrays) - set(names)
    arrays = {n: a for n, a in arrays.items() if n.startswith(kinds) and n not in of_loop}
    arrays = _renamed(arrays, names, of_function)
    for variable, name in pair_variables(model, arrays, state, SingleWorld(), optimizers):
        variable.assign(arrays[name])
    return model


def _state_of_loop(state: Mapping[str, Any], arrays: Arrays) -> set[str]:
    """The names of metrics and variables in the `state` of `trainer.steps`."""
    callbacks = [str(saved["callback"]) for saved in state.get("callbacks", ())]
    if not any(name.startswith("ktrainer.training.loop_state.LoopValues#") for name in callbacks):
        return set()
    return {name for name in arrays if name.startswith("model/state/")}


def _check_vocabularies(model: Any, state: Mapping[str, Any], of_function: bool) -> None:
    for layer, name in lookup_layers(model):
        if int(layer.lookup_table.size()) > 0:
            continue
        if of_function:
            raise CheckpointError(
                f"the layer {name} has no vocabulary, so every word would be an unknown one. "
                "Adapt it in the function that builds the model"
            )
        raise CheckpointError(
            f"the checkpoint has no vocabulary for the layer {name}, so every word would be "
            "an unknown one: it is of an earlier version, or the vocabulary is not text in UTF-8, "
            f"or larger than a checkpoint's description of a model. {_REMEDY}"
        )
    for problem in vocabulary_problems(model, state) if of_function else ():
        raise CheckpointError(
            f"{problem}. In the function that builds the model, adapt it to the same data as then, "
            "and make such layers in the same order, or name them"
        )


def _renamed(arrays: Arrays, names: list[str], may_reorder: bool) -> Arrays:
    """`arrays` by the names of the variables of a model that is built like the saved one.

    Paths depend on the scope in which a layer was built, which differs in a model from a file: only
    the order, and the names of each variable and its layer but for Keras' numbers, are the same.

    Args:
        may_reorder: names in another order are of layers in another order.

    Raises:
        CheckpointError: only numbers say which layers these are.
    """
    saved = [name for name in arrays if name.startswith(("model/", "optimizer/", "seed/"))]
    then, now = list(map(_in_layer, saved)), list(map(_in_layer, names))
    for before, after in ((saved, names), (then, now)) if may_reorder else ():
        if reordered(before, after):
            _check_numbers(before, after)
            return arrays
    alike = [COUNTER.sub("", n) for n in then] == [COUNTER.sub("", n) for n in now]
    return {new: arrays[old] for old, new in zip(saved, names, strict=True)} if alike else arrays


def _check_numbers(before: list[str], after: list[str]) -> None:
    """Refuse layers in another order if their names differ by numbers alone, such as `dense` and
    `dense_1`: Keras numbers layers as they are made, wherever they are in the model."""
    then, now = (
        sorted((n for n in names if n.startswith("model/")), key=lambda n: COUNTER.sub("", n))
        for names in (before, after)
    )
    moved = [(one, other) for one, other in zip(then, now, strict=True) if one != other]
    if moved:
        raise CheckpointError(
            f"the model has {moved[0][1]} where the training had {moved[0][0]}, which may be the "
            "same layer or another one: Keras numbers layers in the order in which they are made. "
            "In the function that builds the model, make and connect the layers as the training "
            "did, or give each the name that it had then"
        )


def _in_layer(name: str) -> str:
    """A variable's name with that of its layer alone; an optimizer's, as its index."""
    if name.startswith("optimizer/"):
        return name.split(":")[0]
    kind, *path = name.split("#")[0].split("/")
    return "/".join([kind, *path[-2:]])


def untrusted_objects(config: Any) -> list[str]:
    """The classes and functions in a description that are not Keras' own, or could run code; each
    once. Empty: building the model runs nothing but Keras."""
    return list(dict.fromkeys(_untrusted(config)))


def _untrusted(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _untrusted(item)
    if not isinstance(value, dict):
        return
    if "class_name" in value and not _is_keras(value):
        name = value.get("config") if value["class_name"] == "function" else value["class_name"]
        yield f"{value.get('module')}.{name}"
    if isinstance(value.get("vocabulary"), str):
        yield f"the file {value['vocabulary']}"
    for item in value.values():
        yield from _untrusted(item)


def _is_keras(described: dict[str, Any]) -> bool:
    name, module = described["class_name"], described.get("module")
    if name in _VALUES:
        return True
    if not isinstance(name, str) or not isinstance(module, str) or name in _DANGEROUS:
        return False
    if name == "function":
        return bool(_FUNCTIONS.fullmatch(module))
    return name in _TOP if module == "keras" else bool(_CLASSES.fullmatch(module))
