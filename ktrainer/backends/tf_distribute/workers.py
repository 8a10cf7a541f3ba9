"""The workers of parameter servers: the coordinator has them run functions, and waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from ktrainer.backends.tf_distribute.lost import ending_in_time
from ktrainer.backends.tf_distribute.serving import Presence
from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.world import World

_POLL = 0.0005  # seconds
_LOOK = 0.5  # seconds between two looks at who is there


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
        self.count = len(presence.tasks("worker"))

    def schedule(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Have a worker run a compiled function; a `RemoteValue`, at once."""
        with self.guard():
            return self._coordinator.schedule(function, args=tuple(args))

    def run(self, function: Callable[..., Any], args: Sequence[Any], what: str) -> Any:
        """Have a worker run it, and wait: what it returned."""
        result = self.schedule(function, args)
        self.wait_for([result], what)
        with self.guard(), self.in_time(what):
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
            ready = sum(result._status_available_event.is_set() for result in results)
            if ready == len(results):
                break
            now = time.monotonic()
            if ready != progress:
                progress, since = ready, now
            if now - looked > _LOOK:
                looked = now
                self._look(what)
            if now - since > self._timeout:
                others = f"Not there: {self._presence.missing() or 'nobody'}."
                others += f"\n{self._presence.where()}"
                raise DeadlineExceeded(0, self._world.step, what, self._timeout, others)
            time.sleep(_POLL)
        with self.guard():
            self._coordinator.done()  # raises what a function has raised

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn TensorFlow's errors of a process that has gone into ours, which name it."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise self._lost(self._presence.missing()) from error

    def in_time(self, what: str) -> AbstractContextManager[None]:
        """In which the servers are asked directly: TensorFlow then waits without a deadline."""
        return ending_in_time(
            self._timeout,
            lambda: str(
                DeadlineExceeded(
                    0,
                    self._world.step,
                    what,
                    self._timeout,
                    f"Silent: {self._presence.silent() or 'nobody'}.",
                )
            ),
        )

    def _look(self, what: str) -> None:
        """A stopped process is found by its silence; TensorFlow would wait for it for ever."""
        with self.guard():
            self._coordinator.done()
        if silent := self._presence.silent():
            raise PeerLost(
                f"the coordinator does not hear of {silent} any more, at step "
                f"{self._world.step} in {what!r}. It has stopped; end it, and start again from the "
                f"last checkpoint.\n{self._presence.where()}"
            )

    def _lost(self, missing: str) -> PeerLost:
        return PeerLost(
            f"the coordinator lost {missing or 'a process of the cluster'} at step "
            f"{self._world.step}, and with it weights. Start again from the last checkpoint."
        )
