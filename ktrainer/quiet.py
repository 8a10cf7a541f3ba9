"""Keep TensorFlow's start-up messages off the screen; it reads these settings when imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEVEL, _SILENT = "TF_CPP_MIN_LOG_LEVEL", "3"


def quiet_tensorflow() -> None:
    """Hide TensorFlow's C++ log unless the user has set its level; name Keras' backend."""
    if "tensorflow" not in sys.modules:
        os.environ.setdefault(_LEVEL, _SILENT)
        muting = any(isinstance(finder, _MutedImport) for finder in sys.meta_path)
        if os.environ[_LEVEL] == _SILENT and not muting:
            sys.meta_path.insert(0, _MutedImport())
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep what C++ libraries print while they load off the screen."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


class _MutedImport(MetaPathFinder):
    """Mutes stderr while TensorFlow is imported for the first time.

    On processors where it uses oneDNN it says so before it has looked at the level of its log.
    Python's own errors and warnings are not lost: they are raised, or kept for later.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_muted(module: ModuleType) -> None:
                with muted():
                    execute(module)

            spec.loader.exec_module = execute_muted  # type: ignore[method-assign]
        return spec
