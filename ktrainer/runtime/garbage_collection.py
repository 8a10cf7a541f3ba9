"""Python's garbage collector, where it would only cost time, and freed memory that the C library
keeps. Standard library only."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FEW_OBJECTS = 200_000  # of which a process without TensorFlow has fewer


@contextmanager
def paused_collection(freeze: bool = False) -> Iterator[None]:
    """Collect no garbage in the block, which imports modules: what they make stays.

    TensorFlow and Keras make half a million objects, and collections during their import look
    through these again and again, in a fifth of its time.

    Args:
        freeze: leave all that exists at the end of the block out of later collections, too: two of
            them took half of the time in which a small pipeline starts. Not where much exists at
            the beginning of the block, which the process might want to free.
    """
    was_enabled = gc.isenabled()
    freeze = freeze and len(gc.get_objects()) < _FEW_OBJECTS
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                # Moves all objects to the oldest generation, where the next collection would
                # otherwise move them one by one.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def return_freed_memory() -> None:
    """Give freed memory back to the system. glibc keeps it for this thread, and the threads that
    train would take more beside it."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
