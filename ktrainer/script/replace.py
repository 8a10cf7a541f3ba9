"""Attributes of other packages that are replaced for a while, and put back together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Make = Callable[[Any], Any]
_INHERITED = object()


class Replacements:
    """What has been replaced, until `close`."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Make) -> None:
        """Set `owner.name`, of a class or module, to `make(what it was)`."""
        # vars() and not getattr(): a static method is put back as a static method.
        self._originals.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, make(getattr(owner, name)))

    def replace_function(self, original: Any, make: Make) -> None:
        """Replace a function of Keras in every module of Keras that has it."""
        replacement = make(original)
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] != "keras":
                continue
            for name in [n for n, value in vars(module).items() if value is original]:
                self._originals.append((module, name, original))
                setattr(module, name, replacement)

    def close(self) -> None:
        """Put everything back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
