"""Restore a captured state: pair arrays with variables, then assign all of it, or nothing.

Of a model that is cut into stages (`placement_of`) each process restores what it holds.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.callback_state import (
    callback_arrays,
    load_callback_states,
    weights_here,
)
from ktrainer.checkpoint.contents.capture_state import SEED, Arrays, named_variables
from ktrainer.checkpoint.contents.data_state import Data, data_name, restore_data
from ktrainer.checkpoint.contents.metric_state import restore_metrics
from ktrainer.checkpoint.contents.powersgd_state import (
    powersgd_names,
    powersgd_problems,
    restore_powersgd,
)
from ktrainer.distributed import World
from ktrainer.errors import CheckpointError
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.named_variables import (
    ATTRIBUTE,
    attribute_variables,
    built_optimizers,
    vocabulary_digests,
)
from ktrainer.steps.powersgd import powersgd_of
from ktrainer.steps.variable_placement import finalize_normalization, placement_of

Pairs = list[tuple[Any, str]]  # (variable, name of its array)

COUNTER = re.compile(r"_\d+")


def pair_variables(
    model: Any, saved: Arrays, state: Mapping[str, Any], world: World, optimizers: bool = True
) -> Pairs:
    """Pair the variables in this process with saved arrays. Changes no value.

    Args:
        saved: the arrays of this rank, or placeholders of their shapes and dtypes.
        optimizers: whether those of optimizers are paired, too.

    Raises:
        CheckpointError: on all ranks, if the arrays do not fit all of the model.
    """
    problems = _build_optimizers(model, state.get("optimizers", [])) if optimizers else []
    kinds = kinds_of_arrays(optimizers)
    named = [(name, v) for name, v in named_variables(model) if name.startswith(kinds)]
    pairs, mismatches = match_arrays(_part(saved, *kinds), named)
    problems += [*mismatches, *powersgd_problems(model, saved, state)]
    local = local_variables(model)
    problems += [
        f"{key} is of a local layer, with values of each rank: name it in backend.local_layers"
        for variable, key in pairs
        if key in state.get("local", ()) and id(variable) not in local
    ]
    if world.any(bool(problems), "comparison with a checkpoint"):
        raise CheckpointError(
            "the checkpoint does not fit this model, and nothing was loaded:\n  "
            + "\n  ".join(problems or ["it fits here, but not on another rank"])
        )
    placement = placement_of(model)
    return [(v, key) for v, key in pairs if key == SEED or placement is None or placement.holds(v)]


def kinds_of_arrays(optimizers: bool) -> tuple[str, ...]:
    """How the names of arrays begin that `pair_variables` pairs."""
    return ("model/", "seed/", "optimizer/") if optimizers else ("model/", "seed/")


def pair_attributes(model: Any, saved: Arrays, world: World) -> Pairs:
    """Pair `attribute_variables` with saved arrays. Those that do not fit on some rank are left as
    they are there, with a warning: checkpoints have none that differed, and a step may make some.
    All ranks call it together.

    Args:
        saved: as for `pair_variables`.
    """
    saved, every = _part(saved, ATTRIBUTE), attribute_variables(model)
    own = dict(attribute_variables(model, metrics=False))
    of_metrics = {name for name, _ in every} - own.keys()
    if world.size > 1 or not of_metrics & saved.keys():  # of other ranks, or earlier versions
        saved = {name: array for name, array in saved.items() if name not in of_metrics}
        every = list(own.items())
    pairs, problems = match_arrays(saved, every)
    found = world.allgather(problems, "attributes that do not fit a checkpoint")
    if any(found) and world.is_root:
        said = dict.fromkeys(problem for each in found for problem in each)
        warnings.warn(
            "a tf.Variable or tf.random.Generator that is an attribute of a layer, the loss or an "
            f"optimizer is not restored, and begins as the script makes it: {'; '.join(said)}",
            stacklevel=4,
        )
    return [(v, key) for v, key in pairs if _differs(v, saved[key]) is None]


def vocabulary_problems(model: Any, state: Mapping[str, Any]) -> list[str]:
    """Each vocabulary of `model` that is not that of the checkpoint, in words; earlier versions
    saved nothing to compare."""
    saved = state.get("vocabularies", {})
    return [
        f"the vocabulary of the layer {name} is not that of the checkpoint ({digest} now, "
        f"{saved[name]} then), whose weights were trained for other words"
        for name, digest in vocabulary_digests(model).items()
        if saved.get(name, digest) != digest
    ]


def needed_arrays(
    model: Any, pairs: Pairs, saved: Iterable[str], state: Mapping[str, Any], world: World
) -> set[str]:
    """The names of the arrays that this rank needs for `assign_state`."""
    names = {key for _, key in pairs}
    names |= {name for name in saved if name.startswith("metrics/")}
    names |= {data_name(world.rank), data_name(0)} & set(saved)  # its own, or a common one
    if powersgd_of(model) is not None:
        names |= set(powersgd_names(state))
    return names | set(callback_arrays(state.get("callbacks", []), weights_here(model)))


def assign_state(
    model: Any,
    pairs: Pairs,
    arrays: Arrays,
    state: Mapping[str, Any],
    world: World,
    *,
    callbacks: Iterable[Any] = (),
    feed: Data | None = None,
    counted: MetricCounts | None = None,
    attributes: bool = True,
) -> Progress:
    """Assign a captured state that fits; return the position to resume from.

    Args:
        pairs: the result of `pair_variables`.
        arrays: at least the `needed_arrays`.
        feed: the data whose position is restored; None leaves it unchanged.
        counted: the metric counts of this rank, to be restored.
        attributes: also restore plain attributes of users' callbacks.
    """
    for variable, name in pairs:
        variable.assign(arrays[name])
    finalize_normalization(model)
    restore_powersgd(model, arrays, state, world)
    progress = Progress.from_dict(dict(state["progress"]))
    if progress.batch:
        restore_metrics(model, arrays, state, world, counted)
    restore_data(feed, arrays, state, world)
    load_callback_states(callbacks, state.get("callbacks", []), arrays, model, attributes)
    model.stop_training = bool(state.get("stop_training", False))
    return progress


def _build_optimizers(model: Any, saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Build optimizers that were built when saved, such as a GAN's, which its first step builds.
    Those of a model in stages are built by its backend."""
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


def match_arrays(
    saved: Mapping[str, np.ndarray], variables: Sequence[tuple[str, Any]]
) -> tuple[list[tuple[Any, str]], list[str]]:
    """Pair variables with saved arrays, by name. Values are not looked at.

    Keras numbers unnamed layers by the history of the process (`dense_3`), so where the names
    do not all agree, arrays are paired in order, if their names agree but for such numbers. Not
    if the weights' names do: then they are numbers that the user gave, in another order.

    Args:
        saved: arrays, or placeholders of their shapes and dtypes, by name, in the order in which
            they were saved.
        variables: (name, variable) of this model.

    Returns:
        (variable, name of its array) pairs, and every mismatch in words. Use the pairs only if
        there are no mismatches.
    """
    named = dict(variables)
    order, problems = {name: name for name in named if name in saved}, []
    if set(saved) != set(named):
        if reordered(saved, named):
            problems.append("the layers are in another order than then: list them as they were")
        elif [COUNTER.sub("", n) for n in saved] == [COUNTER.sub("", n) for n in named]:
            order = dict(zip(named, saved, strict=True))
    problems += [f"{name} is not in the checkpoint" for name in named if name not in order]
    taken = set(order.values())
    problems += [f"{name} is in the checkpoint only" for name in saved if name not in taken]
    pairs = []
    for name, key in order.items():
        problem = _differs(named[name], saved[key])
        if problem:
            problems.append(f"{name} {problem}")
        pairs.append((named[name], key))
    return pairs, problems


def reordered(saved: Iterable[str], named: Iterable[str]) -> bool:
    """Whether the weights of both have the same names, in another order."""
    then, now = ([n for n in names if n.startswith("model/")] for names in (saved, named))
    return then != now and sorted(then) == sorted(now)


def _differs(variable: Any, array: np.ndarray) -> str | None:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    if shape != array.shape:
        return f"has shape {list(shape)}, but {list(array.shape)} in the checkpoint"
    if dtype != array.dtype.name:
        return f"has dtype {dtype}, but {array.dtype.name} in the checkpoint"
    return None


def _part(arrays: Arrays, *prefixes: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name.startswith(prefixes)}
