"""The workers of parameter servers: the coordinator has them run functions, and waits for them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ktrainer.backends.tf_distribute.presence import Presence
from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.world import World

_POLL = 0.0005  # seconds
_LOOK = 0.5  # seconds between two looks at who is there
_GRACE = 3.0  # seconds that whoever waits for functions has to say who has stopped


class Workers:
    """Runs functions on whichever worker is free.

    Args:
        strategy: the coordinator's.
        presence: who is there.
        world: names the step.
        timeout: seconds in which some function must end, while any is under way.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, presence: Presence, world: World, timeout: float
    ) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._presence, self._world, self._timeout = presence, world, timeout
        self._told = False  # who has stopped
        self.count = len(presence.tasks("worker"))

    def schedule(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Have a worker run a compiled function; a `RemoteValue`, at once."""
        with self.guard():
            return self._coordinator.schedule(function, args=tuple(args))

    def run(self, function: Callable[..., Any], args: Sequence[Any], what: str) -> Any:
        """Have a worker run it, and wait: what it returned."""
        result = self.schedule(function, args)
        self.wait_for([result], what)
        return result.fetch()

    def wait_for(self, results: Sequence[Any], what: str = "updates of the workers") -> None:
        """Wait until all of `results` are there.

        Raises:
            DeadlineExceeded: nothing has come for `timeout` seconds.
            PeerLost: a server has gone, or a process does not answer; it is named.
        """
        results = list(results)
        progress, since, looked = -1, time.monotonic(), 0.0
        while True:
            # What a worker has computed is copied from there, and it may stop in between.
            ready = sum(result._has_fetched_to_local for result in results)
            if ready == len(results):
                break
            self._raise_errors(results)
            now = time.monotonic()
            if ready != progress:
                progress, since = ready, now
            if now - looked > _LOOK:
                looked = now
                self._look(what)
            if now - since > self._timeout:
                others = f"Not there: {self._presence.missing() or 'nobody'}."
                others += f"\n{self._presence.where()}"
                raise DeadlineExceeded(
                    0, self._world.step, what, self._timeout, others, "backend.timeout"
                )
            time.sleep(_POLL)
        with self.guard():
            self._coordinator.done()  # raises what a function has raised

    def _raise_errors(self, results: Sequence[Any]) -> None:
        """Raise what one of the functions has raised."""
        for result in results:
            if result._status_available_event.is_set() and result._error is not None:
                with self.guard():
                    self._coordinator.done()  # raises the first one; the others are cancelled
                    raise result._error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn TensorFlow's errors of a process that has gone into ours, which name it."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise self._lost(self._presence.missing()) from error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In which the coordinator itself may ask servers, for a weight or to save all of them.

        For one that has stopped, TensorFlow waits without a deadline, and cannot be stopped in
        it: this process then ends, saying so.

        Raises:
            PeerLost: a server has gone.
        """
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        watch.start()
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            if not (missing := self._presence.missing("ps")):
                raise  # of something else, such as a remote file
            raise self._lost(missing) from error
        finally:
            over.set()
            watch.join()

    @property
    def lost_weights(self) -> bool:
        """Whether a server has gone, or has stopped."""
        return bool(self._presence.missing("ps") or self._presence.silent("ps"))

    def _watch(self, over: threading.Event) -> None:
        since = None
        while not over.wait(_LOOK) and not self._told:
            if not (silent := self._presence.silent("ps")):
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > _GRACE:
                error = self._stopped(silent, "a question to the servers")
                print(f"PeerLost: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self, what: str) -> None:
        """A stopped process is found by its silence; TensorFlow would wait for it for ever."""
        with self.guard():
            self._coordinator.done()
        if silent := self._presence.silent():
            self._told = True
            raise self._stopped(silent, what)

    def _stopped(self, silent: str, what: str) -> PeerLost:
        return PeerLost(
            f"the coordinator does not hear of {silent} any more, at step {self._world.step} in "
            f"{what!r}. It has stopped; end it, and start again from the last checkpoint.\n"
            f"{self._presence.where()}"
        )

    def _lost(self, missing: str) -> PeerLost:
        return PeerLost(
            f"the coordinator lost {missing or 'a process of the cluster'} at step "
            f"{self._world.step}, and with it weights. Start again from the last checkpoint."
        )
