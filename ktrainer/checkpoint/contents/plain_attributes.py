"""Plain attributes of callbacks of the user's own: what they count without a `state_dict`.

Numbers, strings, and lists and dicts of these, that have changed since `on_train_begin` are part of
a callback's state, as are lists of weights. What has not changed is how it was made, which a
restarted script may have made otherwise. Arrays, sets, deques, and longer lists that have changed
are named in a warning.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from ktrainer.callbacks.base import overrides

_OTHERS = ("keras", "ktrainer")  # packages whose callbacks keep their state in other ways
_NOT_STATE = ("model", "_model", "params", "validation_data", "trainer")
_MOST = 1000  # entries of lists and dicts
_MOST_BYTES = 1 << 16  # of arrays that are compared

_at_begin: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_named: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # in a warning


class _Opaque(tuple[Any, ...]):
    """What tells one value of an attribute that is not kept from another one."""


def note_attributes(callbacks: Iterable[Any]) -> None:
    """Remember what the attributes are at the end of `on_train_begin`."""
    for callback in callbacks:
        if has_plain_state(callback):
            _at_begin[callback] = _values(callback)


def changed_attributes(callback: Any) -> dict[str, Any]:
    """The plain attributes that have changed, as JSON-able copies."""
    if not has_plain_state(callback) or callback not in _at_begin:
        return {}
    before, now = _at_begin[callback], _values(callback)
    changed = {n: v for n, v in now.items() if n not in before or not _same(before[n], v)}
    _warn_of_opaque(callback, [n for n, v in changed.items() if isinstance(v, _Opaque)])
    return {n: v for n, v in changed.items() if not isinstance(v, _Opaque)}


def set_attributes(callback: Any, saved: Mapping[str, Any]) -> None:
    """Make the plain attributes those of `changed_attributes`, and the others as at the begin."""
    if not has_plain_state(callback) or callback not in _at_begin:
        return
    for name, value in {**_at_begin[callback], **saved}.items():
        # A checkpoint is untrusted: no method is replaced.
        usual = inspect.getattr_static(type(callback), name, None)
        if _may_be_state(callback, name) and _is_plain(usual) and _is_plain(value):
            setattr(callback, name, copy.deepcopy(value))


def weight_lists(callback: Any, model: Any) -> list[str]:
    """Names of the attributes that hold weights, as `model.get_weights()` returns them."""
    if not has_plain_state(callback) or callback not in _at_begin or model is None:
        return []
    names = [name for name in vars(callback) if may_hold_weights(callback, name)]
    lists = {name: vars(callback)[name] for name in names if type(vars(callback)[name]) is list}
    arrays = {n: v for n, v in lists.items() if v and all(isinstance(a, np.ndarray) for a in v)}
    shapes = [tuple(weight.shape) for weight in model.weights] if arrays else []
    return [name for name, value in arrays.items() if [a.shape for a in value] == shapes]


def may_hold_weights(callback: Any, name: str) -> bool:
    """Return whether an attribute of a user's callback may be set to a list of arrays."""
    usual = inspect.getattr_static(type(callback), name, None)
    return has_plain_state(callback) and _may_be_state(callback, name) and _is_plain(usual)


@contextmanager
def attributes_kept(callbacks: Iterable[Any]) -> Iterator[None]:
    """Context after which plain attributes are what they were."""
    before = [(each, _values(each)) for each in callbacks if has_plain_state(each)]
    yield
    for callback, values in before:
        for name, value in values.items():
            if _is_plain(value):
                setattr(callback, name, value)


def has_plain_state(callback: Any) -> bool:
    """Whether a callback is of the user's own, without a state of another kind."""
    kind = type(callback)
    of_others = kind.__module__.partition(".")[0] in _OTHERS
    return not (of_others or overrides(callback, "state_dict") or kind.__hash__ is None)


def _may_be_state(callback: Any, name: str) -> bool:
    """Whether an attribute is the user's: what begins with `_` may be that of a class of Keras' or
    ours that the callback's is derived from."""
    derived = any(
        each.__module__.partition(".")[0] in _OTHERS and each is not keras.callbacks.Callback
        for each in type(callback).__mro__
    )
    hidden = name.startswith("_" if derived else "__")
    return name.isidentifier() and not hidden and name not in _NOT_STATE


def _values(callback: Any) -> dict[str, Any]:
    """Copies of the attributes that can be kept; of others that can be compared, an `_Opaque`."""
    names = [name for name in vars(callback) if _may_be_state(callback, name)]
    values = {name: _comparable(vars(callback)[name]) for name in names}
    return {name: value for name, value in values.items() if value is not _INCOMPARABLE}


_INCOMPARABLE = object()


def _comparable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if _is_plain(value):
        return copy.deepcopy(value)
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return _Opaque([value.dtype, value.shape, small and zlib.crc32(value.tobytes())])
    too_long = isinstance(value, (list, dict)) and len(value) > _MOST
    if too_long or isinstance(value, (set, deque)):
        return _Opaque([type(value), len(value)])
    return _INCOMPARABLE


def _is_plain(value: Any) -> bool:
    return _scalars(value) <= _MOST


def _scalars(value: Any) -> float:
    """How many scalars a plain value has; infinity if it is none."""
    if value is None or type(value) in (bool, int, float, str):
        return 1
    if type(value) is dict and all(type(key) is str for key in value):
        value = list(value.values())
    if type(value) is not list or len(value) > _MOST:
        return math.inf
    return sum(map(_scalars, value))


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two or (one != one and two != two))


def _warn_of_opaque(callback: Any, names: list[str]) -> None:
    told = _named.setdefault(callback, set())
    new = [name for name in names if name not in told]
    told.update(new)
    if new:
        kind = type(callback).__name__
        warnings.warn(
            f"{kind}.{', '.join(new)}: of what a callback changes, checkpoints hold numbers, "
            "strings, and short lists and dicts of these, but no such attribute: it begins anew in "
            f"a run that resumes. If training depends on it, give {kind} `state_dict()` and "
            "`load_state_dict(state)`",
            stacklevel=4,
        )
