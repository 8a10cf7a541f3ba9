"""Functions that stop in the middle, where they ask for something: threads of which one runs.

A step's body runs once for each microbatch, and stops where it needs another stage. Exactly one
thread runs at any time, so the order of everything, also of what a `tf.function` records, is that
of the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

_here = threading.local()


class _Abandoned(BaseException):
    """Ends a body that is not resumed."""


class Coroutine:
    """A function in a thread of its own that runs only inside of `resume`.

    Args:
        function: takes no arguments; it may call `ask`.
        name: of the thread.

    Attributes:
        request: what the function asks for; None before it starts and once it has ended.
        ended: whether it has returned.
        result: what it returned.
        tape: of what it computes; the function's own.
        losses: of the models that it has called, by `id()`.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.request: Any = None
        self.ended, self.result = False, None
        self.tape: tf.GradientTape | None = None
        self.losses: dict[int, list[Any]] = {}
        self._function, self._error = function, None  # type: tuple[Any, BaseException | None]
        self._answer: Any = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._keras = dict(vars(global_state.GLOBAL_STATE_TRACKER))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def resume(self, answer: Any = None) -> None:
        """Run on until the function asks for something, or ends.

        Raises:
            BaseException: what the function raised, with its traceback.
        """
        self._answer, self.request = answer, None
        if self._started:
            self._go.release()
        else:
            self._started = True
            self._thread.start()
        self._stopped.acquire()
        if self.ended:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def abandon(self) -> None:
        """End the thread of a function that will not be resumed."""
        if self._started and not self.ended:
            self._abandoned = True
            self._go.release()
            self._thread.join()

    def ask(self, request: Any) -> Any:
        """Stop the function, in its own thread, until it is resumed with an answer."""
        self.request = request
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        return self._answer

    def _run(self) -> None:
        _here.coroutine = self
        vars(global_state.GLOBAL_STATE_TRACKER).update(self._keras)
        try:
            with self._graph.as_default() if self._graph is not None else nullcontext():
                self.result = self._function()
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the thread that resumed this one
            self._error = error
        finally:
            self.ended = True
            self._stopped.release()


def current() -> Coroutine | None:
    """The coroutine that this thread runs, or None."""
    return getattr(_here, "coroutine", None)
