"""States of callbacks: ours and users' through `state_dict`, Keras' own through a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Attributes of Keras' callbacks that change during training and decide what they do next.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
_WEIGHTS: dict[type, tuple[str, ...]] = {keras.callbacks.EarlyStopping: ("best_weights",)}


def callback_states(
    callbacks: Iterable[Any],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """(a JSON-able state per callback that has one, their arrays by name)."""
    states: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, callback in _named(callbacks):
        state = _state(callback)
        weights = {}
        for attribute in _listed(callback, _WEIGHTS):
            value = getattr(callback, attribute, None)
            if value is not None:
                weights[attribute] = len(value)
                for k, array in enumerate(value):
                    arrays[f"callbacks/{len(states)}/{attribute}/{k}"] = np.asarray(array)
        if state or weights:
            states.append({"callback": name, "state": state, "weights": weights})
    return states, arrays


def load_callback_states(
    callbacks: Iterable[Any],
    states: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Give each callback its state back. Callbacks are known by class, and by their order
    within it; those that are new, and states whose callback is gone, are passed over."""
    present = dict(_named(callbacks))
    for i, saved in enumerate(states):
        callback = present.get(saved["callback"])
        if callback is None:
            continue
        _load(callback, saved["state"])
        for attribute, count in saved["weights"].items():
            if attribute in _listed(callback, _WEIGHTS):
                value = [arrays[f"callbacks/{i}/{attribute}/{k}"] for k in range(count)]
                setattr(callback, attribute, value)


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    counts: dict[str, int] = {}
    named = []
    for callback in callbacks:
        cls = type(callback)
        name = f"{cls.__module__}.{cls.__qualname__}"
        counts[name] = counts.get(name, 0) + 1
        named.append((f"{name}#{counts[name]}", callback))
    return named


def _listed(callback: Any, table: Mapping[type, tuple[str, ...]]) -> list[str]:
    return [name for cls, names in table.items() if isinstance(callback, cls) for name in names]


def _state(callback: Any) -> dict[str, Any]:
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {
        name: _number(getattr(callback, name))
        for name in _listed(callback, _ATTRIBUTES)
        if hasattr(callback, name)
    }


def _number(value: Any) -> Any:
    """Keras keeps some of these as tensors once it compared them."""
    return value if value is None or isinstance(value, (bool, int, float)) else float(value)


def _load(callback: Any, state: Mapping[str, Any]) -> None:
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(dict(state))
        return
    known = _listed(callback, _ATTRIBUTES)
    for name, value in state.items():
        if name in known:  # a checkpoint names attributes; only these may be set
            setattr(callback, name, value)
