"""States of metrics in mid-epoch: one set per rank, as `metrics/...@<rank>`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ktrainer.distributed import World
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.steps.named_variables import unique_names
from ktrainer.steps.step_helpers import has_own_steps
from ktrainer.steps.variable_placement import placement_of

Arrays = dict[str, np.ndarray]


def metric_states(model: Any, world: World) -> Arrays:
    """The metric states of every rank: a resume on as many ranks is then exact to the bit."""
    mine = {name: np.array(variable.numpy()) for name, variable in _metric_variables(model)}
    every = world.allgather(mine, "metric states for a checkpoint")
    return {
        f"{name}@{r}": array for r, states in enumerate(every) for name, array in states.items()
    }


def states_of_ranks(model: Any, every: Mapping[int, Sequence[np.ndarray]]) -> Arrays:
    """As `metric_states`, from states that are known already.

    Args:
        every: by rank, in the order of `model.metrics_variables`.
    """
    names = [name for name, _ in _metric_variables(model)]
    return {
        f"{name}@{rank}": state
        for rank, states in every.items()
        for name, state in zip(names, states, strict=True)
    }


def counting_ranks(model: Any, world: World) -> list[int]:
    """The ranks that update metrics: all, or under a pipeline those of the last stage. All ranks
    call it together."""
    placement = placement_of(model)
    if placement is None:
        return list(range(world.size))
    every = world.allgather(placement.is_last, "ranks that count metrics")
    return [rank for rank, counts in enumerate(every) if counts]


def restore_metrics(
    model: Any,
    arrays: Arrays,
    state: Mapping[str, Any],
    world: World,
    counted: MetricCounts | None = None,
) -> None:
    """Restore the states of each rank that updates metrics from one that did; if their number has
    changed, the first rank gets the sum. The same for the metric counts in `counted`."""
    here, placement = counting_ranks(model, world), placement_of(model)
    there = list(state.get("counting") or range(int(state.get("world_size", 1))))
    if counted is not None and (every := state.get("counted")):  # absent without a trainer
        same, place = len(there) == len(here), world.rank in here and here.index(world.rank)
        sources = [there[place]] if same else there if place == 0 else []
        counted.take_over(every, sources if world.rank in here else [], there)
    if world.rank in here:
        _restore_states(model, arrays, there, here.index(world.rank), len(here))
    elif placement and has_own_steps(model) and _fit(arrays, _metric_variables(model), there):
        # Such a step counts in all stages, and its logs are compared. Keras' own step does so only
        # in the last stages, and their counts are added to what the others have: nothing.
        _restore_states(model, arrays, there, placement.replica, len(here))


def _restore_states(
    model: Any, arrays: Arrays, there: Sequence[int], place: int, size: int
) -> None:
    """Assign the states of the ranks `there` to the `place`-th of `size` ranks."""
    from ktrainer.steps.metric_states import adds_up

    targets = _metric_variables(model)
    if not _fit(arrays, targets, there):
        warnings.warn(
            "the checkpoint has other metrics: those of the interrupted epoch start at the resume",
            stacklevel=3,
        )
        return
    if len(there) != size and not all(adds_up(m) for m in _flat_metrics(model)):
        warnings.warn(
            f"metrics whose states do not add up cannot move from {len(there)} to {size} ranks: "
            "those of the interrupted epoch will be wrong",
            stacklevel=3,
        )
    for name, variable in targets:
        every = [arrays[f"{name}@{rank}"] for rank in there]
        if len(there) == size:
            variable.assign(every[place])
        else:
            total = np.sum(every, axis=0, dtype=np.float64).astype(every[0].dtype)
            variable.assign(total if place == 0 else np.zeros_like(total))


def _fit(arrays: Arrays, targets: Sequence[tuple[str, Any]], ranks: Sequence[int]) -> bool:
    """Whether `arrays` hold the states of exactly these metrics, of `ranks`."""
    endings = tuple(f"@{rank}" for rank in ranks)
    saved = {n for n in arrays if n.startswith("metrics/") and n.endswith(endings)}
    return saved == {f"{name}@{rank}" for name, _ in targets for rank in ranks} and all(
        arrays[f"{name}@{rank}"].shape == tuple(variable.shape)
        for name, variable in targets
        for rank in ranks
    )


def _metric_variables(model: Any) -> list[tuple[str, Any]]:
    named = [
        (f"metrics/{i}/{k}:{variable.name}", variable)
        for i, metric in enumerate(model.metrics)
        for k, variable in enumerate(metric.variables)
    ]
    return list(zip(unique_names([n for n, _ in named]), [v for _, v in named], strict=True))


def _flat_metrics(model: Any) -> list[Any]:
    flat: list[Any] = []
    for metric in model.metrics:
        compiled = isinstance(getattr(type(metric), "metrics", None), property)
        flat.extend(metric.metrics if compiled else [metric])
    return flat
