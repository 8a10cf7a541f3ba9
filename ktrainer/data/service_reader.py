"""Elements of a tf.data service, with a deadline for one that does not answer."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ktrainer.config.data_service_file import is_reachable
from ktrainer.data.dataset_iterator import elements
from ktrainer.data.prefetch_thread import check_wait
from ktrainer.errors import WorldError

_STARTS = 20  # of a worker within one pass
_POLL = 1.0  # seconds between two looks at a service that sends nothing
_CLOSE_SECONDS = 5.0  # for TensorFlow to let go of the service


def in_order(reader: ServiceReader, first: int, step: int, left: int | None) -> Iterator[Any]:
    """The elements `first`, `first + step`, ... without their numbers.

    Args:
        left: how many; None: until the end.
    """
    if left is not None and left <= 0:
        reader.next()  # dropped: TensorFlow deals to those that have some left once all have asked
    wanted, previous, starts = first, -1, 0
    while left is None or wanted < first + step * left:
        element = reader.next()
        if element is None:
            if left is not None:
                raise WorldError(f"the tf.data service ended its job before batch {wanted // step}")
            return
        number, value = int(element[0]), element[1]
        starts += number <= previous
        previous = number
        if number > wanted or starts > _STARTS:
            what = f"sent element {number} instead of {wanted}"
            what = what if number > wanted else f"began the epoch {starts} times"
            raise WorldError(
                f"the tf.data service {what}: its workers fail, or the pipeline has fewer batches "
                "than its cardinality says. Read the output of `ktrainer data-service`"
            )
        if number == wanted:
            wanted += step
            yield value


class ServiceReader:
    """Elements of a job, taken in a thread, so that a service that is gone ends in an error.

    Args:
        distributed: makes the dataset of the service; in the thread, because TensorFlow registers
            it with the dispatcher, and tries that for ever.
        address: of its dispatcher.
        deadline: seconds without an element before the service is given up, if it does not answer;
            if it does, a warning says that it is waited for.
        path: its file, which it removes when it ends.
    """

    def __init__(
        self,
        distributed: Callable[[], tf.data.Dataset],
        address: str,
        deadline: float,
        path: str,
    ) -> None:
        self._address, self._deadline, self._path = address, deadline, path
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(distributed,), name="ktrainer-feed-service", daemon=True
        )
        self._lost = self._warned = False
        self._thread.start()

    def _run(self, distributed: Callable[[], tf.data.Dataset]) -> None:
        try:
            _, values = elements(distributed())
            self._answers.put(None)
            while self._asked.get():
                self._answers.put((next(values, None), None))
        except Exception as error:
            self._answers.put((None, error))

    def next(self) -> Any:
        """The next element; None at the end.

        Raises:
            WorldError: the service has ended, or does not answer within the deadline.
        """
        self._asked.put(True)
        began = heard = time.monotonic()
        while True:
            try:
                answer = self._answers.get(timeout=_POLL)
            except queue.Empty:
                check_wait()
                if is_reachable(self._address, _POLL):
                    heard = time.monotonic()
                    if heard - began >= self._deadline:
                        self._warn_once(heard - began)
                elif time.monotonic() - heard >= self._deadline:
                    raise self._gone(f"has not answered for {self._deadline:g} s") from None
                continue
            if answer is None:  # opened
                continue
            element, error = answer
            if error is None:
                return element
            if isinstance(error, (tf.errors.UnavailableError, tf.errors.CancelledError)):
                raise self._gone("closed the connection") from error
            raise error

    def _warn_once(self, seconds: float) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the tf.data service at {self._address} has sent no batch for {seconds:.0f} s, "
                "though its dispatcher answers: a worker hangs, or takes that long for a batch. "
                "It is waited for; see the output of `ktrainer data-service --config "
                f"{self._path}`, which starts a worker again that is killed",
                stacklevel=2,
            )

    def _gone(self, what: str) -> WorldError:
        self._lost = True
        return WorldError(
            f"the dispatcher of the tf.data service at {self._address} {what}. See the output of "
            f"`ktrainer data-service --config {self._path}`; start it again and resume. With "
            "--work-dir DIR its dispatchers are started again by themselves, and readers wait up "
            "to data.service.deadline seconds for them"
        )

    def close(self) -> None:
        """Stop the thread; one that waits for a lost service is left to itself."""
        self._asked.put(False)
        self._thread.join(_POLL if self._lost else min(_CLOSE_SECONDS, self._deadline))
