"""States of callbacks: what `state_dict` returns; of Keras' classes, and those derived from them,
the attributes in a table; of a user's own without `state_dict`, `plain_attributes`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from ktrainer.callbacks.csv_log import LOG_END, log_end
from ktrainer.checkpoint.contents.plain_attributes import (
    changed_state,
    is_users_own,
    may_hold_weights,
    set_attributes,
)
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.variable_placement import placement_of

_SEEN = ("_batches_seen_since_last_saving", "_last_batch_seen")
# Attributes of Keras' callbacks that change during training and affect it.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", *_SEEN),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.OrbaxCheckpoint: ("best", *_SEEN, "_total_batches_seen"),
    keras.callbacks.CSVLogger: (LOG_END,),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
_WEIGHTS: dict[type, tuple[str, ...]] = {keras.callbacks.EarlyStopping: ("best_weights",)}


def callback_states(
    callbacks: Iterable[Any], model: Any = None, held: bool = False
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """(a JSON-able state per callback that has one, their arrays by name).

    Args:
        model: the model whose weights the callbacks hold. If it is cut into stages, the arrays are
            those that this process saves; the states hold the number of all.
        held: return all arrays of this process, not only those that it saves.
    """
    states: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    saved = weights_here(model) if held else _saved_here(model)
    # Of a model that is cut into stages, or has local layers, a user's list is not of its weights.
    whole = model is not None and saved is None and not local_variables(model)
    for name, callback in _named(callbacks):
        state = dict(callback.state_dict()) if hasattr(callback, "state_dict") else {}
        attributes, weights = _attributes(callback), {}
        own, lists = changed_state(callback, model if whole else None, _known(callback))
        for attribute in [*_listed(callback, _WEIGHTS), *lists]:
            value = getattr(callback, attribute, None)
            if value is not None:
                weights[attribute] = len(value)
                # A user's may be changed in place, while it is written.
                made = np.array if attribute in lists else np.asarray
                for k, array in enumerate(value):
                    if saved is None or saved[k]:
                        arrays[_array_name(len(states), attribute, k)] = made(array)
        # Those of a user's may differ between ranks; the place of a state names its arrays.
        if state or attributes or weights or is_users_own(callback):
            kept = {"state": state, "attributes": {**own, **attributes}, "weights": weights}
            states.append({"callback": name, **kept})
    return states, arrays


def callback_arrays(
    states: Sequence[Mapping[str, Any]], held: Sequence[bool] | None = None
) -> Iterator[str]:
    """The names of the arrays of `states`.

    Args:
        held: for each of the model's weights whether it is asked for; None: all are.
    """
    for i, saved in enumerate(states):
        for attribute, count in saved["weights"].items():
            for k in range(count):
                if held is None or (k < len(held) and held[k]):
                    yield _array_name(i, attribute, k)


def load_callback_states(
    callbacks: Iterable[Any],
    states: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
    model: Any = None,
    attributes: bool = True,
) -> None:
    """Restore the state of each callback. Callbacks are matched by class and what they monitor, and
    by order within it; new callbacks, and states without a callback, are skipped.

    Args:
        model: if it is cut into stages, weights of other processes become None.
        attributes: also the plain ones of callbacks of the user's own.
    """
    callbacks = list(callbacks)
    present = dict(_named(callbacks, monitored=False)) | dict(_named(callbacks))
    _warn_of_other_monitors(callbacks, {saved["callback"] for saved in states})
    here = set(callback_arrays(states, weights_here(model)))
    for i, saved in enumerate(states):
        callback = present.get(saved["callback"])
        if callback is None:
            continue
        _load(callback, saved, attributes)
        whole = attributes and weights_here(model) is None
        own = [n for n in saved["weights"] if whole and n not in _known(callback)]
        own = [name for name in own if may_hold_weights(callback, name)]
        for attribute in [*_listed(callback, _WEIGHTS), *own]:
            names = [
                _array_name(i, attribute, k) for k in range(saved["weights"].get(attribute, 0))
            ]
            values = [np.array(arrays[n]) if n in here else None for n in names]
            with suppress(AttributeError):  # a user's class may compute it
                setattr(callback, attribute, values or None)


def _array_name(place: int, attribute: str, k: int) -> str:
    return f"callbacks/{place}/{attribute}/{k}"


def _saved_here(model: Any) -> list[bool] | None:
    """For each of the model's weights whether this process saves it; None: all of them."""
    placement = placement_of(model) if model is not None else None
    if placement is None:
        return None
    return [placement.replica == 0 and placement.owns(weight) for weight in model.weights]


def weights_here(model: Any) -> list[bool] | None:
    """For each of the model's weights whether its value is here; None: all are."""
    placement = placement_of(model) if model is not None else None
    return None if placement is None else [placement.holds(w) for w in model.weights]


def _named(callbacks: Iterable[Any], monitored: bool = True) -> list[tuple[str, Any]]:
    """Callbacks by class, what they monitor, and order.

    Args:
        monitored: False: the names in checkpoints of earlier versions, without what they monitor.
    """
    counts: dict[str, int] = {}
    named = []
    for callback in callbacks:
        name = _class_name(callback)
        if monitored and isinstance(callback, tuple(_ATTRIBUTES)) and hasattr(callback, "monitor"):
            name += f"({callback.monitor})"
        counts[name] = counts.get(name, 0) + 1
        named.append((f"{name}#{counts[name]}", callback))
    return named


def _class_name(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _warn_of_other_monitors(callbacks: Iterable[Any], saved: set[str]) -> None:
    """Warn of callbacks that start afresh, where one of their class monitored something else."""
    named = dict(_named(callbacks))
    unused = saved - set(named)
    for name, callback in named.items():
        begins = f"{_class_name(callback)}("
        if name not in saved and any(each.startswith(begins) for each in unused):
            warnings.warn(
                f"{type(callback).__name__} starts afresh: it monitors {callback.monitor}, and the "
                "checkpoint's monitored something else",
                stacklevel=3,
            )


def _listed(callback: Any, table: Mapping[type, tuple[str, ...]]) -> list[str]:
    return [name for cls, names in table.items() if isinstance(callback, cls) for name in names]


def _known(callback: Any) -> list[str]:
    """Attributes of a class of Keras' that the callback's is, or is derived from."""
    return [*_listed(callback, _ATTRIBUTES), *_listed(callback, _WEIGHTS)]


def _attributes(callback: Any) -> dict[str, Any]:
    names = _listed(callback, _ATTRIBUTES)
    values = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    found = {name: _number(value) for name, value in values.items() if _is_number(value)}
    # Of all ranks, as the place of a state in the list names its arrays.
    is_log = isinstance(callback, keras.callbacks.CSVLogger)
    return found | ({LOG_END: log_end(callback)} if is_log else {})


def _is_number(value: Any) -> bool:
    """Whether Keras' class has set an attribute: a user's may use it for a table, for example."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value is None
    return not isinstance(value, str)


def _number(value: Any) -> Any:
    """Keras keeps some of these as tensors once it compared them."""
    return value if value is None or isinstance(value, (bool, int, float)) else float(value)


def _load(callback: Any, saved: Mapping[str, Any], plain: bool) -> None:
    known = _known(callback)
    # Checkpoints of earlier versions have the attributes as the state.
    attributes = saved.get("attributes", saved["state"])
    if plain:
        own = {n: v for n, v in attributes.items() if n not in known}
        set_attributes(callback, own, known)
    for name, value in attributes.items():
        # A checkpoint is untrusted: only known attributes may be set.
        if name in _listed(callback, _ATTRIBUTES):
            with suppress(AttributeError):  # a user's class may compute it
                setattr(callback, name, value)
    if saved["state"] and hasattr(callback, "load_state_dict"):
        callback.load_state_dict(dict(saved["state"]))
