"""Replace attributes of other packages for a while, and restore them.

A replacement is seen by the whole process. While a step is traced, data sources compute in threads
of their own, which must find the original functions: a replacement of `replaced_in` belongs to a
scope, and acts in those threads alone that have entered it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Replacement = tuple[Any, str, Any]  # owner, name of its attribute, new value
_INHERITED = object()
_entered = threading.local()


class Replacements:
    """Attributes that stay replaced until `close`, or until the end of a `with` block."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`, of a module, a class or an object, by `value`."""
        # vars() and not getattr(): a static method is restored as a static method.
        self._originals.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(original)`."""
        self.set(owner, name, make(getattr(owner, name)))

    def wrap_function(self, original: Any, make: Callable[[Any], Any]) -> None:
        """Replace a function of Keras by `make(original)` in every module of Keras that has it."""
        replacement = make(original)
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] != "keras":
                continue
            for name in [n for n, value in vars(module).items() if value is original]:
                self.set(module, name, replacement)

    def close(self) -> None:
        """Restore everything, the last replacement first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> Replacements:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Replace attributes inside the block, in all threads."""
    with Replacements() as replacing:
        for owner, name, value in replacements:
            replacing.set(owner, name, value)
        yield


@contextmanager
def replaced_in(scope: Any, replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace functions inside the block, in threads that have entered `scope`.

    Args:
        scope: any object; see `entered_in_this_thread`.
        replacements: owners, names, and what is called instead.
    """
    with Replacements() as replacing:
        for owner, name, replacement in replacements:
            replacing.wrap(owner, name, functools.partial(_either, scope, replacement))
        yield


def _either(
    scope: Any, replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`replacement` in threads that have entered `scope`, `original` in others."""

    @functools.wraps(original, updated=())  # TensorFlow's notes are of the original alone
    def either(*args: Any, **named: Any) -> Any:
        return (replacement if is_entered(scope) else original)(*args, **named)

    return either


def entered_here() -> tuple[Any, ...]:
    """The scopes that this thread has entered, the innermost last."""
    found: tuple[Any, ...] = getattr(_entered, "scopes", ())
    return found


@contextmanager
def entered_in_this_thread(*scopes: Any) -> Iterator[None]:
    """Let replacements that belong to `scopes` act in this thread."""
    before = entered_here()
    _entered.scopes = (*before, *scopes)
    try:
        yield
    finally:
        _entered.scopes = before


def is_entered(scope: Any) -> bool:
    """Tell whether this thread has entered `scope`."""
    return any(each is scope for each in entered_here())


def as_in_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for another thread, in the scopes that this thread has entered."""
    scopes = entered_here()

    def in_scopes(*args: Any) -> Any:
        missing = [scope for scope in scopes if not is_entered(scope)]
        with entered_in_this_thread(*missing):
            return function(*args)

    return in_scopes


def wrap_import(
    finder: MetaPathFinder,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
    around: Callable[[], AbstractContextManager[None]],
) -> ModuleSpec | None:
    """Find a module for `finder`, by those behind it; the module is executed in `around()`.

    The finder stays in `sys.meta_path` until then: libraries that work with several frameworks look
    for a module without importing it.
    """
    later = sys.meta_path[sys.meta_path.index(finder) + 1 :]
    finders = (getattr(each, "find_spec", None) for each in later)  # as Python 3.12 does
    found = (find(name, path, target) for find in finders if find is not None)
    spec = next((each for each in found if each is not None), None)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_around(module: ModuleType) -> None:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            with around():
                execute(module)

        spec.loader.exec_module = execute_around
    return spec
