"""What travels between the test process and a rank: functions by name, values by pickle."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import ModuleType
from typing import Any


def pack_task(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], fresh: bool
) -> bytes:
    """A call, ready to send.

    Args:
        function: defined at the top level of a module (or a static method of a class there).
        fresh: the rank must open a new `World`, because the last task may have left messages.
    """
    name = function.__qualname__
    if "<" in name:
        raise TypeError(
            f"{name} cannot be sent to other processes: define it at the top level of the test "
            "module, and pass what it closes over as arguments"
        )
    where = (function.__module__, inspect.getfile(function), name)
    return pickle.dumps((where, fresh, pickle.dumps((tuple(args), dict(kwargs)))))


def unpack_task(message: bytes) -> tuple[bool, Callable[[], Any]]:
    """`fresh`, and the call; unpickling of arguments is left to the call, so that it may fail."""
    (module, file, name), fresh, payload = pickle.loads(message)

    def call() -> Any:
        function = reduce(getattr, name.split("."), load_module(module, file))
        args, kwargs = pickle.loads(payload)
        return function(*args, **kwargs)

    return fresh, call


def load_module(name: str, file: str) -> ModuleType:
    """Import `name`; a test module that is in no package is loaded from its file."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def pack_result(value: Any, seconds: float, reusable: bool) -> bytes:
    """A returned value, ready to send; one that does not pickle becomes an error.

    Args:
        reusable: whether the process can take another task.
    """
    try:
        return pickle.dumps((pickle.dumps(value), None, "", seconds, reusable))
    except Exception as error:
        return pack_error(TypeError(f"the result does not pickle: {error}"), seconds, reusable)


def pack_error(error: BaseException, seconds: float, reusable: bool) -> bytes:
    """An exception with the text of its traceback."""
    text = "".join(traceback.format_exception(error))
    try:
        body = pickle.dumps(error)
        pickle.loads(body)  # exceptions with arguments of their own often pickle but do not load
    except Exception:
        body = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickle.dumps((None, body, text, seconds, reusable))


def unpack_result(message: bytes) -> tuple[Any, BaseException | None, str, float, bool]:
    """`(value, error, traceback, seconds, reusable)`; a value that does not load here is an
    error."""
    value, error, text, seconds, reusable = pickle.loads(message)
    if error is not None:
        return None, pickle.loads(error), text, seconds, reusable
    try:
        return pickle.loads(value), None, text, seconds, reusable
    except Exception as cause:
        failed = TypeError(f"the result does not unpickle in the test's process: {cause!r}")
        return None, failed, str(failed), seconds, reusable
