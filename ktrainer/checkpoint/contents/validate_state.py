"""Validate the state of a run in a checkpoint before it is restored.

Checksums prove that a file is intact, not that this program wrote it. A state that is restored
halfway, or on rank 0 alone, is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.callback_state import callback_arrays
from ktrainer.checkpoint.contents.data_state import LEAST_BYTES, data_name
from ktrainer.checkpoint.contents.local_state import names_of_all_ranks
from ktrainer.checkpoint.contents.powersgd_state import (
    error_names,
    is_powersgd_state,
    powersgd_names,
)
from ktrainer.checkpoint.format.checkpoint_folder import STATE
from ktrainer.checkpoint.format.checkpoint_reader import Arrays, read_checkpoint
from ktrainer.checkpoint.format.value_encoding import is_count
from ktrainer.errors import CheckpointError
from ktrainer.state.progress import Progress

_MOST_RANKS = 2**20  # before memory is taken for so many


def read_run(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, state) of a run's checkpoint, verified and validated.

    Raises:
        CheckpointError: it is damaged, or not the state of a run.
    """
    arrays, state = read_checkpoint(path)
    problem = state_problem(state, arrays)
    if problem is not None:
        raise CheckpointError(
            f"{path / STATE} is not the state of a run: {problem}. Its checksum is valid, so "
            "another program, or another version, has written it."
        )
    return arrays, state


def state_problem(state: Any, arrays: Mapping[str, np.ndarray]) -> str | None:
    """The reason why no run can have saved `state` with `arrays`; None if there is none."""
    if not isinstance(state, dict):
        return "it is no table"
    if "progress" not in state:
        return "it has no 'progress'"
    for part, is_right in _PARTS.items():
        if part in state and not is_right(state[part]):
            return f"its {part!r} is {state[part]!r:.200}"
    if any(rank >= state.get("world_size", 1) for rank in state.get("counting") or ()):
        return f"its 'counting' has more ranks than {state.get('world_size', 1)}"
    if len(state.get("counted") or ()) not in (0, state.get("world_size", 1)):
        return f"its 'counted' is not of {state.get('world_size', 1)} ranks"
    local, ranks = state.get("local", ()), state.get("world_size", 1)
    if len(local) * ranks > len(arrays):
        return f"its 'local' has more names than there are arrays of {ranks} ranks"
    if not set(error_names(state)) <= set(local):
        return "its 'powersgd' has variables whose arrays are not of each rank"
    plain = dict.fromkeys([*_names(state, len(arrays)), *local])
    names = names_of_all_ranks(plain, local, ranks)
    missing = [name for name in names if name not in arrays]
    if missing:
        return f"it needs the array {missing[0]!r}, which is not in the checkpoint"
    for rank in range(len(state.get("data_replicas", ()))):
        place = arrays[data_name(rank)]
        if place.dtype != np.uint8 or place.nbytes < LEAST_BYTES:
            return f"{data_name(rank)!r} is no position in the data"
    return None


def _names(state: Mapping[str, Any], most: int) -> list[str]:
    """The arrays that a state needs; stops counting above `most`."""
    names = [data_name(rank) for rank in range(len(state.get("data_replicas", ())))]
    states = state.get("callbacks", [])
    if sum(sum(saved["weights"].values()) for saved in states) > most:
        return ["callbacks/..."]
    return names + list(callback_arrays(states)) + powersgd_names(state)


def _progress(value: Any) -> bool:
    if not isinstance(value, dict) or not {"epoch", "batch", "step"} <= set(value):
        return False
    kinds = {field.name: field.default for field in fields(Progress) if field.name != "validated"}
    counters = all(_like(value[name], kinds[name]) for name in kinds if name in value)
    return counters and _logs(value.get("validated", {}))


def _like(value: Any, default: Any) -> bool:
    """Whether a counter may have this value."""
    if isinstance(default, float):
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is bool if isinstance(default, bool) else is_count(value)


def _history(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    epochs, logs = value.get("epoch", []), value.get("history", {})
    return (
        isinstance(epochs, list)
        and isinstance(logs, dict)
        and all(isinstance(each, list) for each in logs.values())
    )


def _logs(value: Any) -> bool:
    return isinstance(value, dict) and all(
        each is None or isinstance(each, np.ndarray) or type(each) in (int, float)
        for each in value.values()
    )


def _nested_logs(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_nested_logs, value.values()))
    if isinstance(value, list):
        return all(map(_nested_logs, value))
    return value is None or type(value) in (int, float)


def _counted(value: Any) -> bool:
    """(examples, last, logs) of each rank; see `MetricCounts.take_over`."""
    return isinstance(value, list) and all(
        isinstance(each, list)
        and len(each) == 3
        and _counts(each[:2])
        and (each[2] is None or (isinstance(each[2], dict) and _nested_logs(each[2])))
        for each in value
    )


def _callbacks(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("callback"), str)
        and isinstance(each.get("state"), dict)
        and isinstance(each.get("attributes", {}), dict)
        and isinstance(each.get("weights"), dict)
        and all(map(is_count, each["weights"].values()))
        for each in value
    )


def _optimizers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("class"), str)
        and type(each.get("built")) is bool
        and _counts(each.get("variables"))
        for each in value
    )


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _data(value: Any) -> bool:
    plain = (type(None), bool, int, float, str)
    counts = ("seed", "steps_per_epoch", "initial_epoch", "batches in an epoch")
    return (
        isinstance(value, dict)
        and all(isinstance(each, plain) for each in value.values())
        and all(is_count(value.get(name, 0)) for name in counts)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_PARTS: dict[str, Callable[[Any], bool]] = {
    "progress": _progress,
    "history": _history,
    "callbacks": _callbacks,
    "optimizers": _optimizers,
    "stop_training": lambda value: type(value) is bool,
    "world_size": lambda value: is_count(value) and 0 < value <= _MOST_RANKS,
    "counting": _counts,
    "counted": _counted,
    "data_replicas": _counts,
    "data": _data,
    "vocabularies": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "powersgd": is_powersgd_state,
    "local": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}
