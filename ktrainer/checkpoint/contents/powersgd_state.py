"""The state of PowerSGD in a checkpoint: see `steps/powersgd.py`.

Arrays: `powersgd/<k>/basis`, and `powersgd/<k>/error@<rank>`, where k is the variable's place in
`model.variables`. State: `powersgd`, the rank of the products and these places.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ktrainer.checkpoint.format.value_encoding import is_count
from ktrainer.distributed import World
from ktrainer.steps.named_variables import view_of
from ktrainer.steps.powersgd import PowerSgd, is_compressed, matrix_shape, powersgd_of

Arrays = dict[str, np.ndarray]
KEY = "powersgd"


def powersgd_arrays(model: Any) -> Arrays:
    """The arrays of this rank; none without PowerSGD, or before its first update."""
    compression = powersgd_of(model)
    if compression is None:
        return {}
    found: Arrays = {}
    for place, memory in compression.memories.items():
        found[_error(place)] = view_of(memory.error)
        found[_basis(place)] = view_of(memory.basis)
    return found


def powersgd_facts(model: Any) -> dict[str, Any]:
    """The facts of it in `state.json`."""
    compression = powersgd_of(model)
    if compression is None:
        return {}
    return {KEY: {"rank": compression.rank, "variables": list(compression.memories)}}


def powersgd_names(state: Mapping[str, Any]) -> list[str]:
    """The names of all arrays of a state, those of each rank once."""
    return [name(place) for place in _places(state) for name in (_error, _basis)]


def error_names(state: Mapping[str, Any]) -> list[str]:
    """The names of the arrays that each rank has of its own."""
    return [_error(place) for place in _places(state)]


def is_error(name: str) -> bool:
    return name.startswith(f"{KEY}/")


def powersgd_problems(model: Any, saved: Arrays, state: Mapping[str, Any]) -> list[str]:
    """The reasons why the arrays of a checkpoint do not fit a model that is trained so."""
    compression, variables = powersgd_of(model), model.variables
    if compression is None or KEY not in state:
        return []
    rank, asked = state[KEY]["rank"], compression.rank
    if rank != asked:
        return [f"it was trained with backend.powersgd_rank={rank}, and {asked} is asked for"]
    problems = []
    for place in _places(state):
        shape = tuple(variables[place].shape) if place < len(variables) else ()
        expected = [matrix_shape(shape), (shape[-1], rank)] if is_compressed(shape, rank) else []
        if [saved[name(place)].shape for name in (_error, _basis)] != expected:
            problems.append(f"powersgd/{place} is of another variable")
    return problems


def restore_powersgd(model: Any, arrays: Arrays, state: Mapping[str, Any], world: World) -> None:
    """Restore what is yet to be sent; where the checkpoint has nothing, nothing is."""
    compression = powersgd_of(model)
    if compression is not None:
        for memory in compression.memories.values():
            memory.clear()
        for place in _places(state):
            _restore(compression, place, arrays)
    elif _places(state) and world.is_root:
        warnings.warn(
            "the checkpoint has gradients that PowerSGD has yet to send, and this run does not "
            "use it (backend.compression, or one process): they are dropped",
            stacklevel=4,
        )


def _restore(compression: PowerSgd, place: int, arrays: Arrays) -> None:
    memory = compression.memory_at(place)
    memory.error.assign(arrays[_error(place)])
    memory.basis.assign(arrays[_basis(place)])


def deal_errors(arrays: Arrays, state: Mapping[str, Any], size: int) -> Arrays:
    """`arrays` for another number of ranks: the first one gets all that is yet to be sent, as only
    its sum counts."""
    saved = int(state.get("world_size", 1))
    if saved == size:
        return arrays
    dealt = dict(arrays)
    for name in error_names(state):
        each = [dealt.pop(f"{name}@{rank}") for rank in range(saved)]
        dealt[f"{name}@0"] = np.sum(each, 0, dtype=each[0].dtype)
        dealt |= {f"{name}@{rank}": np.zeros_like(each[0]) for rank in range(1, size)}
    return dealt


def is_powersgd_state(value: Any) -> bool:
    """Return whether this may be what `powersgd_facts` said."""
    if not isinstance(value, dict) or not {"rank", "variables"} <= set(value):
        return False
    return is_count(value["rank"]) and _are_places(value["variables"])


def _are_places(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value)) and len(set(value)) == len(value)


def _places(state: Mapping[str, Any]) -> Iterable[int]:
    places: list[int] = state.get(KEY, {}).get("variables", [])
    return places


def _error(place: int) -> str:
    return f"{KEY}/{place}/error"


def _basis(place: int) -> str:
    return f"{KEY}/{place}/basis"
