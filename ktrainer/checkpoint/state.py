"""The whole state of a run: taken out of the objects that hold it, and put back.

Arrays: `model/<path>`, `optimizer/<i>/<k>:<name>`, `seed/global`, and in mid-epoch
`metrics/<i>/<k>:<name>@<rank>` and `data/<rank>`; arrays of callbacks as
`callbacks/<i>/<name>/<k>`.
State: progress, History, callbacks' states, the optimizers' classes and variables, early stop,
what each rank has counted of the epoch.

Of a model that is cut into stages (`placement_of`) each process takes out, and puts back, what it
holds; names are those of the whole model, so a checkpoint fits any number of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ktrainer.callbacks.variables import all_variables, built_optimizers
from ktrainer.checkpoint.callback_state import (
    callback_arrays,
    callback_states,
    load_callback_states,
)
from ktrainer.checkpoint.data_state import Data, data_name, data_states, replicas_of, restore_data
from ktrainer.checkpoint.matching import match
from ktrainer.checkpoint.metric_state import counting_ranks, metric_states, restore_metrics
from ktrainer.counted import Counted
from ktrainer.errors import CheckpointError
from ktrainer.progress import Progress
from ktrainer.steps.placement import Placement, placement_of
from ktrainer.world import World

Arrays = dict[str, np.ndarray]
Pairs = list[tuple[Any, str]]  # (variable, name of its array)

_SEED = "seed/global"


def capture(
    model: Any,
    progress: Progress,
    world: World,
    *,
    callbacks: Iterable[Any] = (),
    history: Mapping[str, Any] | None = None,
    feed: Data | None = None,
    place: Mapping[str, Any] | None = None,
    counted: Counted | None = None,
) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, state) of a run between two steps. All ranks call it together.

    Under a pipeline the arrays are those that this rank writes: of the first replica, each stage
    its own (`names_to_save` has all); of the others, none.

    Args:
        progress: where the run stands. Metrics are kept only inside an epoch.
        callbacks: those whose states are kept.
        history: `{"epoch": [...], "history": {...}}`, as of `keras.callbacks.History`.
        feed: the data, whose iterators' states are kept.
        place: what the position in the data depends on; None: nobody counts it.
        counted: what this rank has counted of the epoch; None: nobody counts.
    """
    placement = placement_of(model)
    arrays: Arrays = {n: _value(v) for n, v in variables_of(model) if _saves(n, v, placement)}
    if progress.batch:
        metrics = metric_states(model, world)
        if placement is None or world.is_root:
            arrays.update(metrics)
    places = data_states(feed, progress, world)
    if world.is_root:
        arrays.update(places)
    states, more = callback_states(callbacks, model)
    arrays.update(more)
    state = {
        "progress": progress.to_dict(),
        "history": dict(history or {"epoch": [], "history": {}}),
        "callbacks": states,
        "optimizers": [_describe(optimizer, model) for optimizer in built_optimizers(model)],
        "stop_training": bool(getattr(model, "stop_training", False)),
        "world_size": world.size,
        "data_replicas": replicas_of(world) if places else [],
    }
    if place is not None:
        state["data"] = dict(place)
    if counted is not None and progress.batch:
        mine = [counted.examples, counted.last, counted.plain_logs()]
        state["counted"] = world.allgather(mine, "what each rank has counted")
    if placement is not None:
        state["counting"] = counting_ranks(model, world)
    return arrays, state


def names_to_save(model: Any, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """The names of all arrays of a checkpoint, in its order, whichever rank writes them.

    Args:
        arrays, state: what `capture` gave on rank 0.
    """
    names = [name for name, _ in variables_of(model)]
    names += [name for name in arrays if name.startswith(("metrics/", "data/"))]
    return names + list(callback_arrays(state["callbacks"]))


def restore(
    model: Any,
    arrays: Arrays,
    state: Mapping[str, Any],
    world: World,
    *,
    callbacks: Iterable[Any] = (),
) -> Progress:
    """Put a captured state back. Nothing is changed unless all of it fits.

    Args:
        arrays: all of them, on every rank.

    Returns:
        Where the run stood.

    Raises:
        CheckpointError: it belongs to another model; lists every mismatch.
    """
    pairs = pair(model, arrays, state, world)
    return put_back(model, pairs, arrays, state, world, callbacks=callbacks)


def pair(model: Any, saved: Arrays, state: Mapping[str, Any], world: World) -> Pairs:
    """Which array goes to which of the variables that are in this process. Changes no value.

    Args:
        saved: the arrays, or stand-ins of their shapes and dtypes.

    Raises:
        CheckpointError: on all ranks, if the arrays do not fit all of the model.
    """
    problems = _build_optimizers(model, state.get("optimizers", []))
    named = variables_of(model)
    pairs, mismatches = match(_part(saved, "model/", "optimizer/", "seed/"), named)
    problems += mismatches
    if world.any(bool(problems), "comparison with a checkpoint"):
        raise CheckpointError(
            "the checkpoint does not fit this model, and nothing was loaded:\n  "
            + "\n  ".join(problems or ["it fits here, but not on another rank"])
        )
    placement = placement_of(model)
    return [(v, key) for v, key in pairs if key == _SEED or placement is None or placement.holds(v)]


def needed(
    model: Any, pairs: Pairs, saved: Iterable[str], state: Mapping[str, Any], world: World
) -> set[str]:
    """The names of the arrays that this rank needs for `put_back`."""
    names = {key for _, key in pairs}
    names |= {name for name in saved if name.startswith("metrics/")}
    names |= {data_name(world.rank)} & set(saved)
    return names | set(callback_arrays(state.get("callbacks", []), model))


def put_back(
    model: Any,
    pairs: Pairs,
    arrays: Arrays,
    state: Mapping[str, Any],
    world: World,
    *,
    callbacks: Iterable[Any] = (),
    feed: Data | None = None,
    counted: Counted | None = None,
) -> Progress:
    """Put a captured state back, which was found to fit; returns where the run stood.

    Args:
        pairs: what `pair` gave.
        arrays: at least those that are `needed`.
        feed: the data that are to go on; None leaves them where they are.
        counted: given what this rank has counted.
    """
    for variable, name in pairs:
        variable.assign(arrays[name])
    progress = Progress.from_dict(dict(state["progress"]))
    if progress.batch:
        restore_metrics(model, arrays, state, world, counted)
    restore_data(feed, arrays, state, world)
    load_callback_states(callbacks, state.get("callbacks", []), arrays, model)
    model.stop_training = bool(state.get("stop_training", False))
    return progress


def variables_of(model: Any) -> list[tuple[str, Any]]:
    """(unique name, variable) of the model, its optimizers and Keras' global seed generator;
    the same on every rank, whether or not the values are there."""
    return [*all_variables(model), *_global_seed()]


def variables_here(model: Any) -> list[tuple[str, Any]]:
    """Those of `variables_of` whose values are in this process."""
    placement = placement_of(model)
    named = variables_of(model)
    return [(n, v) for n, v in named if placement is None or n == _SEED or placement.holds(v)]


def _saves(name: str, variable: Any, placement: Placement | None) -> bool:
    """Whether this rank takes `variable` into a checkpoint."""
    if placement is None:
        return True
    if placement.replica != 0:
        return False
    # Each process has a global seed generator of its own.
    return placement.partition == 0 if name == _SEED else placement.owns(variable)


def _global_seed() -> list[tuple[str, Any]]:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    # Made at the first unseeded random call; asking for it makes it, so that the state of a
    # run always has the same parts.
    seed_generator.global_seed_generator()
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [(_SEED, generator.state)]


def _describe(optimizer: Any, model: Any) -> dict[str, Any]:
    """An optimizer's class, and the places of its variables in `model.variables`."""
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    trained = getattr(optimizer, "_trainable_variables", [])
    return {
        "class": type(optimizer).__name__,
        "built": bool(optimizer.built),
        "variables": [places[id(v)] for v in trained if id(v) in places],
    }


def _build_optimizers(model: Any, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Build optimizers that were built when saved, as a GAN's are in its first step. Those of a
    model in stages are built by its backend."""
    present = built_optimizers(model)
    here = [type(optimizer).__name__ for optimizer in present]
    there = [str(facts["class"]) for facts in saved]
    if here != there:
        return [f"this model has the optimizers {here}, the checkpoint {there}"]
    if placement_of(model) is not None:
        return []
    variables = model.variables
    for optimizer, facts in zip(present, saved, strict=True):
        places = facts["variables"]
        if facts["built"] and not optimizer.built and max(places, default=0) < len(variables):
            optimizer.build([variables[place] for place in places])
    return []


def _value(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy())  # which Keras copies


def _part(arrays: Arrays, *prefixes: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name.startswith(prefixes)}


def history_of(model: Any) -> dict[str, Any]:
    """The History that Keras' callback list attached to `model`, as JSON-able lists."""
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return {"epoch": [], "history": {}}
    values = {key: list(items) for key, items in history.history.items()}
    return {"epoch": list(getattr(history, "epoch", [])), "history": values}
