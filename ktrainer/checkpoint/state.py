"""The whole state of a run: taken out of the objects that hold it, and put back.

Arrays: `model/<path>`, `optimizer/<i>/<k>:<name>`, `seed/global`, and in mid-epoch
`metrics/<i>/<k>:<name>@<rank>`; arrays of callbacks as `callbacks/<i>/<name>/<k>`.
State: progress, History, callbacks' states, the optimizers' classes and variables, early stop.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ktrainer.callbacks.variables import built_optimizers, model_variables, unique_names
from ktrainer.checkpoint.callback_state import callback_states, load_callback_states
from ktrainer.checkpoint.matching import match
from ktrainer.errors import CheckpointError
from ktrainer.progress import Progress
from ktrainer.world import World

Arrays = dict[str, np.ndarray]


def capture(
    model: Any,
    progress: Progress,
    world: World,
    *,
    callbacks: Iterable[Any] = (),
    history: Mapping[str, Any] | None = None,
) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, state) of a run between two steps. All ranks call it together.

    Args:
        progress: where the run stands. Metrics are kept only inside an epoch.
        callbacks: those whose states are kept.
        history: `{"epoch": [...], "history": {...}}`, as of `keras.callbacks.History`.
    """
    arrays: Arrays = {name: _value(v) for name, v in variables_of(model)}
    if progress.batch:
        arrays.update(_metric_states(model, world))
    states, more = callback_states(callbacks)
    arrays.update(more)
    state = {
        "progress": progress.to_dict(),
        "history": dict(history or {"epoch": [], "history": {}}),
        "callbacks": states,
        "optimizers": [_describe(optimizer, model) for optimizer in built_optimizers(model)],
        "stop_training": bool(getattr(model, "stop_training", False)),
        "world_size": world.size,
    }
    return arrays, state


def restore(
    model: Any,
    arrays: Arrays,
    state: Mapping[str, Any],
    world: World,
    *,
    callbacks: Iterable[Any] = (),
) -> Progress:
    """Put a captured state back. Nothing is changed unless all of it fits.

    Returns:
        Where the run stood.

    Raises:
        CheckpointError: it belongs to another model; lists every mismatch.
    """
    problems = _build_optimizers(model, state.get("optimizers", []))
    pairs, mismatches = match(_part(arrays, "model/", "optimizer/", "seed/"), variables_of(model))
    problems += mismatches
    if world.any(bool(problems), "comparison with a checkpoint"):
        raise CheckpointError(
            "the checkpoint does not fit this model, and nothing was loaded:\n  "
            + "\n  ".join(problems or ["it fits here, but not on another rank"])
        )
    for variable, array in pairs:
        variable.assign(array)
    progress = Progress.from_dict(dict(state["progress"]))
    if progress.batch:
        _restore_metrics(model, arrays, int(state.get("world_size", 1)), world)
    load_callback_states(callbacks, state.get("callbacks", []), arrays)
    model.stop_training = bool(state.get("stop_training", False))
    return progress


def variables_of(model: Any) -> list[tuple[str, Any]]:
    """(unique name, variable) of the model, its optimizers and Keras' global seed generator."""
    return [*model_variables(model), *_global_seed()]


def _global_seed() -> list[tuple[str, Any]]:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    # Made at the first unseeded random call; asking for it makes it, so that the state of a
    # run always has the same parts.
    seed_generator.global_seed_generator()
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [("seed/global", generator.state)]


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
    """Build optimizers that were built when saved, as a GAN's are in its first step."""
    present = built_optimizers(model)
    here = [type(optimizer).__name__ for optimizer in present]
    there = [str(facts["class"]) for facts in saved]
    if here != there:
        return [f"this model has the optimizers {here}, the checkpoint {there}"]
    variables = model.variables
    for optimizer, facts in zip(present, saved, strict=True):
        places = facts["variables"]
        if facts["built"] and not optimizer.built and max(places, default=0) < len(variables):
            optimizer.build([variables[place] for place in places])
    return []


def _value(variable: Any) -> np.ndarray:
    return np.array(variable.numpy())


def _part(arrays: Arrays, *prefixes: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name.startswith(prefixes)}


def _metric_variables(model: Any) -> list[tuple[str, Any]]:
    named = [
        (f"metrics/{i}/{k}:{variable.name}", variable)
        for i, metric in enumerate(model.metrics)
        for k, variable in enumerate(metric.variables)
    ]
    return list(zip(unique_names([n for n, _ in named]), [v for _, v in named], strict=True))


def _metric_states(model: Any, world: World) -> Arrays:
    """Every rank's own metric states: a resume on as many ranks is then exact to the bit."""
    mine = {name: _value(variable) for name, variable in _metric_variables(model)}
    every = world.allgather(mine, "metric states for a checkpoint")
    return {
        f"{name}@{r}": array for r, states in enumerate(every) for name, array in states.items()
    }


def _restore_metrics(model: Any, arrays: Arrays, saved_size: int, world: World) -> None:
    """Give each rank its own states; on another number of ranks, rank 0 gets their sum."""
    from ktrainer.callbacks.reduction import adds_up

    saved = _part(arrays, "metrics/")
    targets = _metric_variables(model)
    expected = {f"{name}@{rank}" for name, _ in targets for rank in range(saved_size)}
    fitting = expected == set(saved) and all(
        saved[f"{name}@0"].shape == tuple(variable.shape) for name, variable in targets
    )
    if not fitting:
        warnings.warn(
            "the checkpoint was made with other metrics: those of the interrupted epoch count "
            "from its resumption on",
            stacklevel=2,
        )
        return
    if saved_size != world.size and not all(adds_up(m) for m in _flat_metrics(model)):
        warnings.warn(
            f"metrics whose states do not add up cannot move from {saved_size} to {world.size} "
            "ranks: the interrupted epoch's will be off",
            stacklevel=2,
        )
    for name, variable in targets:
        every = [saved[f"{name}@{rank}"] for rank in range(saved_size)]
        if saved_size == world.size:
            variable.assign(every[world.rank])
        else:
            total = np.sum(every, axis=0, dtype=np.float64).astype(every[0].dtype)
            variable.assign(total if world.rank == 0 else np.zeros_like(total))


def _flat_metrics(model: Any) -> list[Any]:
    flat: list[Any] = []
    for metric in model.metrics:
        compiled = isinstance(getattr(type(metric), "metrics", None), property)
        flat.extend(metric.metrics if compiled else [metric])
    return flat


def history_of(model: Any) -> dict[str, Any]:
    """The History that Keras' callback list attached to `model`, as JSON-able lists."""
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return {"epoch": [], "history": {}}
    values = {key: list(items) for key, items in history.history.items()}
    return {"epoch": list(getattr(history, "epoch", [])), "history": values}
