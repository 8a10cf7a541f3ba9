"""Python's garbage collector, where it would only cost time, and freed memory that the C library
keeps. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage in the block, which imports modules: what they make stays.

    TensorFlow and Keras make half a million objects, and collections during their import look
    through these again and again, in a fifth of its time. Later collections leave them out, too:
    two of them are half of the time in which a small pipeline starts.
    """
    if not gc.isenabled():
        yield
        return
    is_first = "tensorflow" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            if not (is_first and "tensorflow" in sys.modules):
                # A user's models may be among them. All are in the oldest generation now, where
                # the next collection would otherwise move them one by one.
                gc.unfreeze()
        gc.enable()


def return_freed_memory() -> None:
    """Give freed memory back to the system. glibc keeps it for this thread, and the threads that
    train would take more beside it."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
