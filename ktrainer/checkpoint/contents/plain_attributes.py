"""Plain attributes of callbacks of the user's own: what they count without a `state_dict`.

Numbers, strings, and lists and dicts of these, that have changed since `on_train_begin` are part of
a callback's state, as are lists of weights. What has not changed is how it was made, which a
restarted script may have made otherwise. Of a callback that has also changed a tuple, an array, a
set or a long list, nothing is kept, since a part would not fit the rest; a warning says so.

Classes derived from `ktrainer.Callback` are left out: whoever writes one knows of `state_dict`.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from ktrainer.callbacks.base import Callback, overrides

_NOT_STATE = ("model", "_model", "params", "validation_data", "trainer")
_AT_BEGIN, _WARNED = "_ktrainer_at_begin", "_ktrainer_warned"  # attributes that are noted here
_MOST = 1000  # entries of lists and dicts
_DEEPEST = 8  # lists in lists
_SHORT = 64  # characters of a string that count as one entry
_MOST_BYTES = 1 << 16  # of arrays that are compared


class _Opaque(tuple[Any, ...]):
    """Stands for a value that is not kept: what tells it from another one."""


_INCOMPARABLE = object()


def note_attributes(callbacks: Iterable[Any]) -> None:
    """Remember what the attributes are at the end of `on_train_begin`."""
    for callback in callbacks:
        if has_plain_state(callback):
            vars(callback)[_AT_BEGIN] = _values(callback)


def changed_attributes(callback: Any) -> dict[str, Any]:
    """The plain attributes that have changed, as JSON-able copies; none where others have, too."""
    changed = _changed(callback)
    opaque = [name for name, value in changed.items() if isinstance(value, _Opaque)]
    if opaque:
        _warn_of(callback, opaque)
    return {} if opaque else changed


def set_attributes(callback: Any, saved: Mapping[str, Any]) -> None:
    """Make the plain attributes those of `changed_attributes`, and the others as at the begin."""
    if not _is_noted(callback):
        return
    for name, value in {**vars(callback)[_AT_BEGIN], **saved}.items():
        present = _comparable(vars(callback).get(name))
        # What has become an array or a file meanwhile stays as it is, unless it is known better.
        if not _same(present, value) and (name in saved or _is_plain(present)):
            _set(callback, name, value)


def weight_lists(callback: Any, model: Any) -> list[str]:
    """Names of the attributes that hold weights, as `model.get_weights()` returns them."""
    if model is None or not _is_noted(callback):
        return []
    lists = {n: v for n, v in _attributes(callback).items() if type(v) is list and v}
    arrays = {n: v for n, v in lists.items() if all(isinstance(a, np.ndarray) for a in v)}
    if not arrays or any(isinstance(value, _Opaque) for value in _changed(callback).values()):
        return []
    shapes = [tuple(weight.shape) for weight in model.weights]
    return [name for name, value in arrays.items() if [a.shape for a in value] == shapes]


def may_hold_weights(callback: Any, name: str) -> bool:
    """Return whether an attribute of a user's callback may be set to a list of arrays."""
    return has_plain_state(callback) and _may_be_set(callback, name)


def has_plain_state(callback: Any) -> bool:
    """Return whether a callback is of the user's own, without a state of another kind."""
    if isinstance(callback, Callback) or not hasattr(callback, "__dict__"):
        return False
    return not (_is_keras_own(type(callback)) or overrides(callback, "state_dict"))


def _is_keras_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _is_noted(callback: Any) -> bool:
    return has_plain_state(callback) and _AT_BEGIN in vars(callback)


def _changed(callback: Any) -> dict[str, Any]:
    if not _is_noted(callback):
        return {}
    before = vars(callback)[_AT_BEGIN]
    now = _values(callback).items()
    return {n: v for n, v in now if n not in before or not _same(before[n], v)}


def _attributes(callback: Any) -> dict[str, Any]:
    """The attributes that may be state. What begins with `_` may be that of a class of Keras' that
    the callback's is derived from."""
    bases = {*type(callback).__mro__} - {keras.callbacks.Callback}
    hidden = ("_",) if any(map(_is_keras_own, bases)) else ("__", "_ktrainer_")
    names = [n for n in list(vars(callback)) if not n.startswith(hidden) and n not in _NOT_STATE]
    return {name: vars(callback)[name] for name in names if name in vars(callback)}


def _values(callback: Any) -> dict[str, Any]:
    """Copies of the attributes that can be kept; of others that can be compared, an `_Opaque`."""
    values = {name: _comparable(value) for name, value in _attributes(callback).items()}
    return {name: value for name, value in values.items() if value is not _INCOMPARABLE}


def _comparable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    try:
        if _is_plain(value):
            return copy.deepcopy(value)
        if isinstance(value, np.ndarray):
            small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
            return _Opaque([value.dtype, value.shape, small and zlib.crc32(value.tobytes())])
        if isinstance(value, tuple) and _is_plain(list(value)):
            return _Opaque(value)
        too_long = isinstance(value, (list, dict)) and len(value) > _MOST
        if too_long or isinstance(value, (set, deque)):
            return _Opaque([type(value), len(value)])
        if type(value) is dict and _is_plain([*value, *value.values()]):
            return _Opaque(copy.deepcopy([*value.items()]))
    except RuntimeError:  # another thread is changing it
        pass
    return _INCOMPARABLE


def _is_plain(value: Any) -> bool:
    return _entries(value) <= _MOST


def _entries(value: Any, depth: int = 0) -> float:
    """How many entries a plain value has; infinity if it is none, or has too many."""
    if value is None or type(value) in (bool, int, float):
        return 1
    if type(value) is str:
        return 1 + len(value) // _SHORT
    if type(value) not in (list, dict) or len(value) > _MOST or depth == _DEEPEST:
        return math.inf
    if type(value) is dict and not all(type(key) is str for key in value):
        return math.inf
    count = 1.0
    for each in value.values() if type(value) is dict else value:
        count += _entries(each, depth + 1)
        if count > _MOST:
            return math.inf
    return count


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two or (one != one and two != two))


def _may_be_set(callback: Any, name: str) -> bool:
    # A checkpoint is untrusted: no method is replaced.
    usual = inspect.getattr_static(type(callback), name, None)
    return name.isidentifier() and name not in _NOT_STATE and _is_plain(usual)


def _set(callback: Any, name: str, value: Any) -> None:
    if not (_may_be_set(callback, name) and _is_plain(value)):
        return
    present, value = vars(callback).get(name), copy.deepcopy(value)
    if type(present) is list and type(value) is list:  # which the script may have, too
        present[:] = value
    elif type(present) is dict and type(value) is dict:
        present.clear()
        present.update(value)
    else:
        with suppress(AttributeError):  # of a class that lets nothing be set
            setattr(callback, name, value)


def _warn_of(callback: Any, names: list[str]) -> None:
    warned = vars(callback).setdefault(_WARNED, set())
    new = [name for name in names if name not in warned]
    warned.update(new)
    if new:
        kind = type(callback).__name__
        warnings.warn(
            f"no attribute of the callback {kind} is in checkpoints, because it changes "
            f"{', '.join(new)}: they hold numbers, strings, and short lists and dicts of these, "
            f"alone. A run that resumes has {kind} as the script makes it. If training depends on "
            "it, give it `state_dict()` and `load_state_dict(state)`",
            stacklevel=4,
        )
