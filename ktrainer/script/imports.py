"""Act right after a module was imported for the first time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls `action()` when `module` has run, and `before()` before it does.

    Args:
        module: its full name.
        action: called once.
        before: called once.
    """

    def __init__(
        self, module: str, action: Callable[[], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._module, self._action, self._before = module, action, before
        if module in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        self._before()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def is_importing(name: str) -> bool:
    """Whether a module is being imported just now."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
