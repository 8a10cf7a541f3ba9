"""Errors that name the lost process, in place of those that TensorFlow raises."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from ktrainer.backends.tf_distribute.clusters import ClusterSpec
from ktrainer.distributed import World
from ktrainer.errors import DeadlineExceeded, PeerLost

_TASK = re.compile(r"/job:(chief|worker)/(?:replica:\d+/)?task:(\d+)")
_GONE = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
_ASK_SECONDS = 5.0


@contextmanager
def naming_lost_workers(
    world: World, cluster: ClusterSpec | None, timeout: float
) -> Iterator[None]:
    """Turn TensorFlow's errors of a sum over processes into ours.

    Args:
        world: the processes.
        cluster: their addresses; None: there is one process, and errors stay as they are.
        timeout: seconds that a sum could take.

    Raises:
        PeerLost: a process is lost, or does not answer any more; it is named.
        DeadlineExceeded: a sum took too long; names the ranks that do not answer.
    """
    if cluster is None or world.size == 1:
        yield
        return
    try:
        yield
    except _GONE as error:
        raise _peer_lost(world, cluster, error) from error
    except tf.errors.DeadlineExceededError as error:
        deadline, world.deadline = world.deadline, min(world.deadline, _ASK_SECONDS)
        others = "All of them answer."
        try:
            world.barrier("a sum over processes")
        except DeadlineExceeded as late:
            others = late.others  # names the missing ranks
        finally:
            world.deadline = deadline
        raise DeadlineExceeded(
            world.rank, world.step, "a sum over processes", timeout, others, "backend.timeout"
        ) from error


@contextmanager
def exiting_after(seconds: float, text: Callable[[], str]) -> Iterator[None]:
    """End this process, printing `text()`, if the block takes longer: TensorFlow cannot be
    interrupted in it, and would wait for ever."""

    def end() -> None:
        print(text(), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _peer_lost(world: World, cluster: ClusterSpec, error: tf.errors.OpError) -> PeerLost:
    tasks = {(job, int(task)) for job, task in _TASK.findall(error.message)}
    tasks.discard((cluster.job, cluster.task))
    addresses = [cluster.jobs[job][task] for job, task in sorted(tasks)]
    them = ", ".join(f"rank {cluster.workers.index(a)} ({a})" for a in addresses)
    why = "it does not answer any more" if "heartbeat" in error.message else "it has ended"
    return PeerLost(
        f"rank {world.rank} lost {them or 'another rank'} at step {world.step} in a sum over "
        f"processes: {why}"
    )
