"""Keep TensorFlow's start-up messages off the screen; it reads these settings when imported."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ktrainer.runtime.monkeypatching import wrap_import

_LEVEL, _SILENT = "TF_CPP_MIN_LOG_LEVEL", "3"
_BACKEND = "KERAS_BACKEND"
_ours: set[str] = set()  # variables that we have set, not the user


def quiet_tensorflow() -> None:
    """Hide TensorFlow's C++ log unless the user has set its level; name Keras' backend."""
    if "tensorflow" not in sys.modules:
        _set_default(_LEVEL, _SILENT)
        if os.environ[_LEVEL] == _SILENT and not _muting():
            sys.meta_path.insert(0, _MutedImport())
    _set_default(_BACKEND, "tensorflow")


def loud_tensorflow() -> None:
    """Undo `quiet_tensorflow`, so that TensorFlow says what it says on its own.

    Too late, and said so in a warning, once TensorFlow has been imported.
    """
    if "tensorflow" in sys.modules:
        if _LEVEL in _ours:
            warnings.warn(
                "logging.tensorflow=true, but TensorFlow was imported, and kept quiet, before the "
                "configuration was known. Make the Trainer before importing keras, or set the "
                f"environment variable {_LEVEL}=0",
                stacklevel=4,
            )
        return
    for finder in _muting():
        sys.meta_path.remove(finder)
    if _LEVEL in _ours:
        _ours.remove(_LEVEL)
        os.environ.pop(_LEVEL, None)


def environment() -> dict[str, str]:
    """The variables of this process without those that `quiet_tensorflow` has set: what a process
    that is started from here should begin with."""
    return {name: value for name, value in os.environ.items() if name not in _ours}


def _set_default(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _ours.add(name)


def _muting() -> list[_MutedImport]:
    return [finder for finder in sys.meta_path if isinstance(finder, _MutedImport)]


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
        return wrap_import(self, name, path, target, muted)
