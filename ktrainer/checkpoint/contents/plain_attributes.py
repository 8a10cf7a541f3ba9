"""Plain attributes of callbacks of the user's own: what they count without a `state_dict`.

Numbers, scalar variables, strings, and lists and dicts of these, that have changed since
`on_train_begin` are part of a callback's state, as are lists of weights. What has not changed is
how it was made, which a restarted script may have made otherwise. Of a callback that has also
changed a collection of another kind, nothing is kept, since a part would not fit the rest; a
warning says so.

Classes derived from `ktrainer.Callback` are left out: whoever writes one knows of `state_dict`.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import Callback, overrides
from ktrainer.distributed import current_world
from ktrainer.errors import ModelError

_NOT_STATE = ("model", "_model", "params", "validation_data", "trainer")
_AT_BEGIN, _WARNED = "_ktrainer_at_begin", "_ktrainer_warned"  # attributes that are noted here
_MAX_ENTRIES = 1000  # of lists and dicts, with those inside
_MAX_DEPTH = 8
_MAX_CHARACTERS = 10_000
_MAX_BYTES = 1 << 16  # of arrays whose values are compared
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)


class _Fingerprint(tuple[Any, ...]):
    """Of a value that is compared, but not kept."""


class _NotPlain(Exception):
    """A value is none that can be kept."""


def note_attributes(callbacks: Iterable[Any]) -> None:
    """Remember what the attributes are at the end of `on_train_begin`."""
    for callback in callbacks:
        if is_users_own(callback):
            vars(callback)[_AT_BEGIN] = _values(callback)


def changed_state(
    callback: Any, model: Any, known: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The plain attributes that have changed, as JSON-able copies, and the names of those that hold
    weights, as `model.get_weights()` returns them; none where others have changed, too.

    Args:
        model: None: lists of weights are not kept.
        known: names of attributes that are kept otherwise.
    """
    if not _is_noted(callback):
        return {}, []
    changed = {n: v for n, v in _changed(callback).items() if n not in known}
    lists = _weight_lists(callback, model) if model is not None else []
    lists = [name for name in lists if name not in known]
    others = [n for n, v in changed.items() if isinstance(v, _Fingerprint) and n not in lists]
    if others:
        _warn_of(callback, others)
        return {}, []
    return {n: v for n, v in changed.items() if n not in lists}, lists


def set_attributes(callback: Any, saved: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Make the plain attributes those of `changed_state`, and the others as at the begin."""
    if not _is_noted(callback):
        return
    changed = {n: v for n, v in _changed(callback).items() if n not in known}
    if not saved and any(isinstance(v, _Fingerprint) for v in changed.values()):
        return  # of which nothing was kept
    begun = {n: v for n, v in vars(callback)[_AT_BEGIN].items() if n not in known}
    for name, value in {**begun, **saved}.items():
        attribute = vars(callback).get(name)
        if is_scalar_variable(attribute) and name not in saved:
            continue  # it may be the model's, which is restored by itself
        present = _copy_or_fingerprint(attribute)
        # What has become an array or a file meanwhile stays as it is, unless it is known better.
        if not _same(present, value) and (name in saved or _is_plain(present)):
            _set(callback, name, value)


def may_hold_weights(callback: Any, name: str) -> bool:
    """Return whether an attribute of a user's callback may be set to a list of arrays."""
    return is_users_own(callback) and _may_be_set(callback, name)


def is_users_own(callback: Any) -> bool:
    """Return whether a callback is of a class of the user's own, without a `state_dict`."""
    if isinstance(callback, Callback) or not hasattr(callback, "__dict__"):
        return False
    return not (_is_keras_own(type(callback)) or overrides(callback, "state_dict"))


def _is_keras_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _is_noted(callback: Any) -> bool:
    return is_users_own(callback) and _AT_BEGIN in vars(callback)


def _changed(callback: Any) -> dict[str, Any]:
    before = vars(callback)[_AT_BEGIN]
    now = _values(callback).items()
    return {n: v for n, v in now if n not in before or not _same(before[n], v)}


def _weight_lists(callback: Any, model: Any) -> list[str]:
    lists = {n: v for n, v in _attributes(callback).items() if type(v) is list and v}
    arrays = {n: v for n, v in lists.items() if all(isinstance(a, np.ndarray) for a in v)}
    shapes = [tuple(weight.shape) for weight in model.weights] if arrays else []
    return [name for name, value in arrays.items() if [a.shape for a in value] == shapes]


def _attributes(callback: Any) -> dict[str, Any]:
    """The attributes that may be state. What begins with `_` may be that of a class of Keras' that
    the callback's is derived from."""
    bases = {*type(callback).__mro__} - {keras.callbacks.Callback}
    hidden = ("_",) if any(map(_is_keras_own, bases)) else ("__", "_ktrainer_")
    left_out = _not_state(callback)
    names = [n for n in list(vars(callback)) if not n.startswith(hidden) and n not in left_out]
    return {name: vars(callback)[name] for name in names if name in vars(callback)}


def _not_state(callback: Any) -> tuple[str, ...]:
    """Names of attributes that are no state. Keras changes the sign of `min_delta` once, as it
    finds out whether less is better."""
    return (*_NOT_STATE, "min_delta") if hasattr(callback, "monitor_op") else _NOT_STATE


def _values(callback: Any) -> dict[str, Any]:
    """Copies of the attributes that can be kept; of others that can be compared, fingerprints."""
    values = {name: _copy_or_fingerprint(value) for name, value in _attributes(callback).items()}
    return {name: value for name, value in values.items() if value is not _NotPlain}


def _copy_or_fingerprint(value: Any) -> Any:
    try:
        value = np.asarray(value)[()] if is_scalar_variable(value) else value
        return _plain_copy(value, [_MAX_ENTRIES], _MAX_DEPTH)
    except (RuntimeError, ModelError):  # another thread changes it, or another stage has it
        return _NotPlain
    except _NotPlain:
        pass
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _MAX_BYTES and not value.dtype.hasobject
        return _Fingerprint([value.dtype, value.shape, small and zlib.crc32(value.tobytes())])
    if isinstance(value, tuple):
        return _Fingerprint([tuple, len(value), _copy_or_fingerprint(list(value))])
    if isinstance(value, _COLLECTIONS):
        return _Fingerprint([type(value), len(value)])
    return _NotPlain


def _plain_copy(value: Any, room: list[int], depth: int) -> Any:
    """A copy of a value that can be kept, its numbers those of Python.

    Args:
        room: how many more entries it may have.

    Raises:
        _NotPlain: it is none, or too large.
    """
    if isinstance(value, np.generic) or (_is_eager(value) and not value.shape.rank):
        value = np.asarray(value).item()
    room[0] -= 1
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str and len(value) <= _MAX_CHARACTERS:
        return value
    if type(value) not in (list, dict) or len(value) > room[0] or not depth:
        raise _NotPlain
    if type(value) is list:
        return [_plain_copy(each, room, depth - 1) for each in value]
    if any(type(key) is not str for key in value):
        raise _NotPlain
    return {key: _plain_copy(each, room, depth - 1) for key, each in value.items()}


def is_scalar_variable(value: Any) -> bool:
    """Return whether a value is a variable, of TensorFlow or Keras, of one number."""
    return isinstance(value, (tf.Variable, keras.Variable)) and tuple(value.shape) == ()


def _is_eager(value: Any) -> bool:
    return isinstance(value, tf.__internal__.EagerTensor) and value.dtype.is_numpy_compatible


def _is_plain(value: Any) -> bool:
    try:
        _plain_copy(value, [_MAX_ENTRIES], _MAX_DEPTH)
    except _NotPlain:
        return False
    return True


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two or (one != one and two != two))


def _may_be_set(callback: Any, name: str) -> bool:
    # A checkpoint is untrusted: no method is replaced.
    usual = inspect.getattr_static(type(callback), name, None)
    return name.isidentifier() and name not in _not_state(callback) and _is_plain(usual)


def _set(callback: Any, name: str, value: Any) -> None:
    value, present = _copy_or_fingerprint(value), vars(callback).get(name)
    if not _may_be_set(callback, name) or isinstance(value, _Fingerprint) or value is _NotPlain:
        return
    if is_scalar_variable(present):
        with suppress(ModelError):  # which another stage has
            present.assign(value)
    elif type(present) is list and type(value) is list:  # which the script may have, too
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
    world = current_world()
    if new and (world is None or world.is_root):
        kind = type(callback).__name__
        warnings.warn(
            f"no attribute that the class {kind} has set is in checkpoints, because it changes "
            f"{', '.join(new)}: they hold numbers, strings, and short lists and dicts (with string "
            f"keys) of these, alone. A run that resumes has {kind} as the script makes it. If "
            "training depends on it, give it `state_dict()` and `load_state_dict(state)`",
            stacklevel=4,
        )
