"""Steps of one process, as `ktrainer plan --world` measures them.

Each rank trains alone, on the rows that rank 0 of a world of another size would have, and with
collectives over itself alone, which keep a record. As many ranks of a host do so at the same time
as would run on it, each on as many of its cores: processes slow one another down through memory.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf

from ktrainer.config import DataParallelConfig, DataServiceConfig
from ktrainer.data import Feed, LocalBatch, ShuffleOrder, make_feed
from ktrainer.data.batch_source import close_iterator
from ktrainer.distributed.bucket_sizes import BucketSizes, depend_on_links, suitable_sizes
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.distributed.mpi_progress import has_completed
from ktrainer.distributed.sum_in_place import pieces
from ktrainer.distributed.world import SingleWorld, World
from ktrainer.plan.communication_cost import Group, Link
from ktrainer.plan_report.scaling_model import Collective, MeasuredStep
from ktrainer.runtime.hardware import available_cpus, cpu_slices
from ktrainer.training.fit_settings import data_config

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm
    from ktrainer.distributed.mpi_world import MpiWorld
    from ktrainer.training.context import RunContext

_WARM_UP = 5  # steps that compile and fill caches
_SECONDS = 2.0  # of steps that count, for each number of processes
_FEWEST, _MOST = 5, 100  # of them


class OneOfMany(SingleWorld):
    """Rank 0 of a world whose other ranks do not exist: they answer as it does."""

    def __init__(self, size: int) -> None:
        self.size = self.local_size = size

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        return [value] * self.size


class RecordingGradients(MpiGradients):
    """The engine `mpi` over this process alone; keeps what others would have to be sent.

    Attributes:
        recorded: collectives since `begin`.
    """

    def set_buckets(self, backend: DataParallelConfig, group: Group, link: Link) -> BucketSizes:
        """Take the buckets of such processes, and return their sizes.

        Args:
            group: the processes.
            link: between their hosts.
        """
        sizes = BucketSizes()
        if backend.bucket_mb is not None:
            sizes = BucketSizes(backend.bucket_mb, backend.bucket_mb)
        elif depend_on_links(group.hosts, group.fullest, backend.hierarchical is not False):
            sizes = suitable_sizes(link.latency, 1 / link.per_byte if link.per_byte else math.inf)
        self.set_wire(backend.wire, sizes)
        return sizes

    def begin(self) -> None:
        """Start a record at the beginning of a step."""
        self.recorded: list[Collective] = []
        self._began = time.perf_counter()

    def _note(self, kind: Any, start: float, sizes: Sequence[float], halves: bool = False) -> None:
        now = time.perf_counter()
        at = max(0.0, start - self._began)
        self.recorded.append(Collective(kind, at, now - start, tuple(sizes), halves))

    def sum_bucket(
        self, weight: np.ndarray, *arrays: np.ndarray, compressed: bool = True
    ) -> list[np.ndarray]:
        start = time.perf_counter()
        found = super().sum_bucket(weight, *arrays, compressed=compressed)
        sizes = [
            float(sum(self._sent_bytes(view, compressed) for view in views))
            for views in pieces(found)
        ]
        halves = any(self._wire_of(array.dtype, compressed) is not None for array in found)
        self._note("reduce", start, sizes, halves)
        return found

    def _sent_bytes(self, array: np.ndarray, compressed: bool = True) -> int:
        wire = self._wire_of(array.dtype, compressed)
        return array.nbytes if wire is None else array.size * wire.itemsize

    def gather_slices(
        self, weight: np.ndarray, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        start = time.perf_counter()
        found = super().gather_slices(weight, values, indices)
        self._note("gather", start, [8.0, float(self._sent_bytes(values)), float(indices.nbytes)])
        return found

    def _sum_array(self, array: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        total = super()._sum_array(array)
        self._note("sum", start, [float(array.nbytes)])
        return total


Train = Callable[[Sequence[LocalBatch]], Any]


def alone(world: World) -> MpiComm:
    """A group of this rank only."""
    return cast("MpiWorld", world).group([world.rank], "this rank alone")


def measure_step(
    context: RunContext,
    data: Any,
    train: Callable[[Feed], Train],
    recorder: RecordingGradients | None,
    *,
    replicas: int,
    at_once: int,
) -> MeasuredStep:
    """A step of one of `replicas` replicas, the median over steps and ranks; all ranks call it.

    Args:
        train: makes an update; is given the feed first.
        recorder: of the step; None where it has no collectives.
        at_once: how many ranks of a host measure at the same time; others wait.
    """
    world, measuring = context.world, context.world.local_rank < at_once
    found = None
    with _cores(world, at_once):
        feed = make_feed(
            data,
            world=OneOfMany(replicas),
            config=replace(data_config(context.config), service=DataServiceConfig()),
            training=True,
            order=ShuffleOrder(),
            check=False,
        )
        with closing(feed):
            run = train(feed)
            batches = _batches(feed, context.config.trainer.accumulate)
            if measuring:
                for _ in range(_WARM_UP):
                    _step(run, next(batches), recorder)
            _barrier(world)
            if measuring:
                found = _measure(run, batches, recorder)
            _barrier(world)
            close_iterator(batches)
    every = [each for each in world.allgather(found, "measured steps") if each is not None]
    middle = sorted(every, key=lambda each: each.seconds)[(len(every) - 1) // 2]
    return replace(middle, slowdowns=sum((each.slowdowns for each in every), ()))


def _barrier(world: World) -> None:
    """Wait for all ranks, as long as it takes, and without taking time from those that measure."""
    request = cast("MpiComm", world).comm.Ibarrier()
    while not has_completed(request):
        time.sleep(0.01)


def _batches(feed: Feed, accumulate: int) -> Iterator[list[LocalBatch]]:
    """The local batches of each update, epoch after epoch."""
    for epoch in itertools.count():
        batches = feed.epoch(epoch)
        while update := list(itertools.islice(batches, accumulate)):
            yield update


def _step(
    run: Train, update: list[LocalBatch], recorder: RecordingGradients | None
) -> tuple[float, tuple[Collective, ...]]:
    start = time.perf_counter()
    if recorder is not None:
        recorder.begin()
    logs = run(update)
    for value in tf.nest.flatten(logs):
        np.asarray(value)  # waits for a device
    seconds = time.perf_counter() - start
    return seconds, () if recorder is None else tuple(recorder.recorded)


def _measure(
    run: Train, batches: Iterator[list[LocalBatch]], recorder: RecordingGradients | None
) -> MeasuredStep:
    taken = list[tuple[float, tuple[Collective, ...]]]()
    waits, examples, rows = [], [], []
    began = time.perf_counter()
    while len(taken) < _FEWEST or (len(taken) < _MOST and time.perf_counter() - began < _SECONDS):
        start = time.perf_counter()
        update = next(batches)
        waits.append(time.perf_counter() - start)
        taken.append(_step(run, update, recorder))
        examples.append(sum(batch.global_examples for batch in update))
        rows.append(sum(batch.examples for batch in update))
    seconds, collectives = sorted(taken, key=lambda each: each[0])[len(taken) // 2]
    return MeasuredStep(
        statistics.median(rows),
        statistics.median(examples),
        seconds,
        statistics.median(waits),
        collectives,
        tuple(each / seconds for each, _ in taken),
    )


@contextmanager
def _cores(world: World, processes: int) -> Iterator[None]:
    """Context in which all threads of this rank run on its part of the host's cores, as
    `ktrainer run` binds them: on all of them where there are fewer than processes."""
    usable = available_cpus()
    slices = cpu_slices(usable, processes)
    bound = slices[world.local_rank % processes] if slices else []
    _run_on(bound)
    try:
        yield
    finally:
        _run_on(usable if bound else [])


def _run_on(cores: Sequence[int]) -> None:
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
