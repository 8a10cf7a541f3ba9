"""Capture the whole state of a run.

Arrays: `model/<path>`, `optimizer/<i>/<k>:<name>`, `seed/global`, `attribute/<layer>/<name>` (of
`attribute_variables`), and in mid-epoch `metrics/<i>/<k>:<name>@<rank>` and `data/<rank>`; arrays
of callbacks as `callbacks/<i>/<name>/<k>`; those of PowerSGD as `powersgd/<k>/...`. Those of local
layers, and what PowerSGD has yet to send, are one set per rank, `...@<rank>`.
State: progress, History, callbacks' states, the optimizers' classes and variables, early stop,
metric counts of each rank, names of local arrays, digests of vocabularies.

Of a model that is cut into stages (`placement_of`) each process captures what it holds; names are
those of the whole model, so a checkpoint fits any number of stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from ktrainer.checkpoint.contents.callback_state import (
    callback_arrays,
    callback_states,
)
from ktrainer.checkpoint.contents.data_state import (
    Data,
    data_states,
    replicas_of,
)
from ktrainer.checkpoint.contents.local_state import names_of_all_ranks, with_all_ranks
from ktrainer.checkpoint.contents.metric_state import counting_ranks, metric_states
from ktrainer.checkpoint.contents.powersgd_state import (
    error_names,
    powersgd_arrays,
    powersgd_facts,
    powersgd_names,
)
from ktrainer.data.rank_consistency import checksum
from ktrainer.distributed import World
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.named_variables import (
    ATTRIBUTE,
    all_variables,
    attribute_variables,
    built_optimizers,
    view_of,
    vocabulary_digests,
)
from ktrainer.steps.variable_placement import Placement, placement_of

Arrays = dict[str, np.ndarray]
Pairs = list[tuple[Any, str]]  # (variable, name of its array)

SEED = "seed/global"

_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # attributes named in a warning


def capture(
    model: Any,
    progress: Progress,
    world: World,
    *,
    callbacks: Iterable[Any] = (),
    history: Mapping[str, Any] | None = None,
    feed: Data | None = None,
    place: Mapping[str, Any] | None = None,
    counted: MetricCounts | None = None,
) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, state) of a run between two steps. All ranks call it together.

    Under a pipeline the arrays are those that this rank writes: of the first replica, each stage
    its own (`names_to_save` has all); of the others, none.

    Args:
        progress: the position to resume from. Metrics are captured only inside an epoch.
        callbacks: callbacks whose states are captured.
        history: `{"epoch": [...], "history": {...}}`, as of `keras.callbacks.History`.
        feed: the data whose iterators' states are captured.
        place: the data fingerprint; None without a trainer.
        counted: metric counts of this rank; None without a trainer.
    """
    placement = placement_of(model)
    # Views: an operation that updates a variable whose values are in use writes to a copy.
    arrays: Arrays = {n: view_of(v) for n, v in named_variables(model) if _saves(n, v, placement)}
    arrays.update(_common_attributes(model, world))
    if progress.batch:
        metrics = metric_states(model, world)
        if placement is None or world.is_root:
            arrays.update(metrics)
    places = data_states(feed, progress, world)
    if world.is_root:
        arrays.update(places)
    states, more = callback_states(callbacks, model)
    arrays.update(more)
    arrays.update(powersgd_arrays(model))
    facts = powersgd_facts(model)
    local = [*local_names(model, states), *error_names(facts)]
    if local:
        arrays = with_all_ranks(arrays, local, world)
    state = {
        "progress": progress.to_dict(),
        "history": dict(history or {"epoch": [], "history": {}}),
        "callbacks": states,
        "optimizers": [_describe(optimizer, model) for optimizer in built_optimizers(model)],
        "stop_training": world.any(bool(getattr(model, "stop_training", False)), "stop of a rank"),
        "world_size": world.size,
        "vocabularies": vocabulary_digests(model),
        "data_replicas": replicas_of(world)[: len(places)] if places else [],
        **facts,
    }
    if local:
        state["local"] = local
    if place is not None:
        state["data"] = dict(place)
    if counted is not None and progress.batch:
        mine = [counted.examples, counted.last, counted.plain_logs()]
        state["counted"] = world.allgather(mine, "metric counts of each rank")
    if placement is not None:
        state["counting"] = counting_ranks(model, world)
    return arrays, state


def names_to_save(model: Any, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """The names of all arrays of a checkpoint, in its order, whichever rank writes them.

    Args:
        arrays, state: the result of `capture` on rank 0.
    """
    names = [name for name, _ in named_variables(model)]
    names += [name for name in arrays if name.startswith((ATTRIBUTE, "metrics/", "data/"))]
    names += callback_arrays(state["callbacks"])
    names += powersgd_names(state)
    return names_of_all_ranks(names, state.get("local", ()), state["world_size"])


def local_names(model: Any, states: list[dict[str, Any]]) -> list[str]:
    """The names of the arrays that are each rank's own: those of local layers.

    Args:
        states: of the callbacks.
    """
    local = local_variables(model)
    if not local:
        return []
    names = [name for name, variable in named_variables(model) if id(variable) in local]
    weights = [id(weight) in local for weight in model.weights]
    return names + list(callback_arrays(states, weights))


def named_variables(model: Any) -> list[tuple[str, Any]]:
    """(unique name, variable) of the model, its optimizers and Keras' global seed generator; the
    same on every rank, whether or not it holds the values."""
    return [*all_variables(model), *_global_seed()]


def variables_here(model: Any) -> list[tuple[str, Any]]:
    """Those of `named_variables` whose values are in this process, and `attribute_variables`."""
    placement = placement_of(model)
    named = named_variables(model)
    if placement is None:
        return [*named, *attribute_variables(model)]
    return [(n, v) for n, v in named if n == SEED or placement.holds(v)]


def _saves(name: str, variable: Any, placement: Placement | None) -> bool:
    """Whether this rank saves `variable`."""
    if placement is None:
        return True
    if placement.replica != 0:
        return False
    # Each process has a global seed generator of its own.
    return placement.partition == 0 if name == SEED else placement.owns(variable)


def _common_attributes(model: Any, world: World) -> Arrays:
    """The values of `attribute_variables` that all ranks have alike. All ranks call it together.

    The others are left out, with a warning: a value of one rank would be wrong on the others, and
    another number of ranks may resume.
    """
    named = attribute_variables(model, metrics=world.size == 1)
    arrays = {name: view_of(variable) for name, variable in named}
    if world.size == 1 or placement_of(model) is not None:
        return arrays
    here = {(name, checksum(array)) for name, array in arrays.items()}
    every = world.allgather(here, "comparison of attributes")  # of those that have none, too
    common = {name for name, _ in set.intersection(*every)}
    told = _told.setdefault(model, set())
    differ = sorted({name for name, _ in set.union(*every)} - common - told)
    told.update(differ)
    if differ and world.is_root:
        warnings.warn(
            f"{', '.join(differ)}: this tf.Variable or tf.random.Generator differs between ranks, "
            "so checkpoints do not hold it. Make it with layer.add_weight(trainable=False), which "
            "ranks keep equal, or restore it yourself",
            stacklevel=4,
        )
    return {name: array for name, array in arrays.items() if name in common}


def _global_seed() -> list[tuple[str, Any]]:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    # Keras makes it at the first unseeded random call; made here, so that the state of a run always
    # has the same parts.
    seed_generator.global_seed_generator()
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [(SEED, generator.state)]


def _describe(optimizer: Any, model: Any) -> dict[str, Any]:
    """An optimizer's class, whether it is that of `compile` and keeps averages of weights, which
    Keras puts in place as training ends, and the indices of its variables in `model.variables`."""
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    trained = getattr(optimizer, "_trainable_variables", [])
    return {
        "class": type(optimizer).__name__,
        "built": bool(optimizer.built),
        "compiled": optimizer is getattr(model, "optimizer", None),
        "averages": bool(getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", 0)),
        "variables": [places[id(v)] for v in trained if id(v) in places],
    }


def history_of(model: Any) -> dict[str, Any]:
    """The History that Keras' callback list attached to `model`, as JSON-able lists."""
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return {"epoch": [], "history": {}}
    values = {key: list(items) for key, items in history.history.items()}
    return {"epoch": list(getattr(history, "epoch", [])), "history": values}
