"""A tf.data pipeline that the workers of a tf.data service compute, as a source.

How ranks share one service, by `data.service.round_robin` and the number of dispatchers:

| | one dispatcher | one for each rank |
|---|---|---|
| true | slices of the same global batches, read in turns | each has its own pipeline |
| false | whoever asks first gets the next slice | refused |

With `true` a dispatcher has one worker, the order is that of the pipeline, and each element carries
its number: a worker that was started again begins the epoch again, and what is known is dropped.
With `false` workers share the elements (TensorFlow's dynamic sharding).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ktrainer.config.data_service_file import TfDataServiceConfig, check_size
from ktrainer.data.batch_source import Piece
from ktrainer.data.dataset_shards import require_one_order, split_batches
from ktrainer.data.dataset_shuffles import draws_while_read, reshuffling
from ktrainer.data.dataset_source import DatasetSource
from ktrainer.data.service_reader import ServiceReader, in_order
from ktrainer.data.stage_times import StageTimes
from ktrainer.data.tf_data_service import distribute, require_sendable
from ktrainer.distributed.world import World
from ktrainer.errors import CheckpointError, ConfigError, DataError, WorldError

# Of each shuffle, whether the iterators that the service has made of it were read. The shuffles of
# this process do not count these, and in the workers a job begins with the first seed.
_made: weakref.WeakKeyDictionary[tf.data.Dataset, list[bool]] = weakref.WeakKeyDictionary()


class Share(NamedTuple):
    """This rank's part of what the service sends.

    Attributes:
        address: its dispatcher.
        job: names the jobs that ranks share; other ranks of one replica have jobs of their own.
        consumer: its number among those that take turns; None: it has a dispatcher of its own, or
            reads first come first served.
    """

    address: str
    job: str
    consumer: tuple[int, int] | None


class ServiceSource(DatasetSource):
    """The batches of a `tf.data.Dataset`, computed by a tf.data service.

    Args:
        dataset: of batches, as `DatasetSource` takes it.
        service: the service.
        round_robin: in the order of the pipeline, instead of first come first served.
        deadline: seconds without an element from a service that does not answer.
        world, sliced, class_weight, prefetch, device: as for `DatasetSource`.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        service: TfDataServiceConfig,
        round_robin: bool,
        deadline: float,
        world: World,
        sliced: bool,
        class_weight: Mapping[int, float] | None = None,
        prefetch: int = 2,
        device: str | None = None,
    ) -> None:
        if not round_robin and sliced and world.replicas > 1:
            dataset, sliced = split_batches(dataset, world.replicas), False
        self._round_robin, self._deadline, self._service = round_robin, deadline, service
        super().__init__(
            dataset,
            world=world,
            sliced=sliced,
            class_weight=class_weight,
            prefetch=prefetch,
            device=device,
        )
        self._shuffles = list(reshuffling(self._dataset)) if round_robin else []
        self.shuffles = bool(self._shuffles)
        # Else no batch may be skipped, not even of a peeked epoch.
        self.reorders = round_robin and not self.unseeded
        require_sendable(self._dataset)
        self._share = _share(service, world, round_robin)
        self._turns = self._share.consumer is not None
        if self._cut and not self._turns:  # each rank's worker runs the pipeline
            require_one_order(self._dataset)
        self._check_length()
        self._before = self._made_before(world)
        if not round_robin and (world.size > 1 or service.workers_per_dispatcher > 1):
            self.num_batches, self.openings = None, 1  # ranks or workers end in partial batches
        if self._turns and not sliced and self.num_batches is not None:
            replica, replicas = world.replica, world.replicas
            self.num_batches = len(range(replica, self.num_batches, replicas))
        self._passes, self._times = 0, StageTimes()
        self._reader: ServiceReader | None = None

    def _check_length(self) -> None:
        """Refuse an endless pipeline, and one of unknown length that ranks take turns at."""
        if self._turns and self.num_batches is None:
            raise DataError(
                "data.service: ranks that take turns must know the number of batches, which this "
                "tf.data pipeline does not. End it with .apply(tf.data.experimental."
                "assert_cardinality(batches)), without .repeat(), or set "
                "data.service.round_robin=false"
            )
        if self.endless:
            raise DataError(
                "data.service sends the pipeline of one epoch: leave .repeat() out, and set "
                "trainer.epochs"
            )

    def _made_before(self, world: World) -> list[bool]:
        """What other calls have made of the shuffles.

        Raises:
            DataError: the seed that they draw next is not known.
        """
        found = [_made.get(each, []) for each in self._shuffles]
        uneven = any(each != found[0] for each in found)
        if found and not self.unseeded and (uneven or draws_while_read(self._dataset)):
            raise DataError(
                "the tf.data service cannot give the orders of a run without it: the pipeline "
                + (
                    "has a shuffle that an earlier call has read, and one that it has not. Make "
                    "the pipeline again for this call"
                    if uneven
                    else "shuffles below a repeat, concatenate or cache, so it depends on how far "
                    "earlier passes were read. Shuffle after them"
                )
                + ", or set data.service.round_robin=false"
            )
        before = found[0] if found else []
        return world.broadcast(before, 0, "what the tf.data service has shuffled")

    def state(self) -> bytes | None:
        return None  # the position is the number of batches

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        return self.open(epoch, skip)  # the state of a run without a service: the order is the same

    def _open_at_epoch(self, epoch: int, skip: int) -> None:
        if skip and not self._round_robin:
            raise CheckpointError(
                f"epoch {epoch + 1} cannot continue after batch {skip}: first come first served "
                "leaves no record of which examples were read. Resume from a checkpoint at the end "
                "of an epoch (checkpoint.every=1ep), or set data.service.round_robin=true"
            )
        if skip and self.unseeded:
            raise CheckpointError(
                f"epoch {epoch + 1} cannot continue after batch {skip}: the pipeline shuffles "
                "without a seed, so the tf.data service draws another order. Resume from a "
                "checkpoint at the end of an epoch (checkpoint.every=1ep). To resume inside epochs "
                "later, give the shuffle a seed"
            )
        self._close_reader()
        self._opened_before = self.openings * epoch
        self._open_up_to(self._opened_before + 1)
        self._passes += 1
        first, step = self._share.consumer or (0, 1)
        lost = self._read_config().lost_workers
        sent = self._sent(epoch, skip)
        self._reader = ServiceReader(sent, self._share.address, self._deadline, self._service.path)
        if self._round_robin:
            left = None if self.num_batches is None else self.num_batches - skip
            values = in_order(self._reader, first, step, left)
        else:
            values = self._each_once(self._reader, lost)
        self._values = self._times.items(values, "the tf.data service")
        self._iterator = self._reader

    def _open_up_to(self, openings: int) -> None:
        """Note so many iterators, which are made by the workers."""
        made = self._made_up_to(openings)
        for each in self._shuffles:
            if len(made) > len(_made.get(each, [])):
                _made[each] = made

    def _made_up_to(self, openings: int) -> list[bool]:
        """Of all iterators until this call has made so many, whether they were read: of those of
        one pass the first is."""
        return [*self._before, *(number % self.openings == 0 for number in range(openings))]

    def replay_passes(self, passes: int, openings: int) -> None:
        self._open_up_to(openings)

    def slow_stage(self) -> str | None:
        return self._times.slowest()

    def _sent(self, epoch: int, skip: int) -> Callable[[], tf.data.Dataset]:
        """A function that sends the pipeline of an epoch to the service."""
        dataset = self._dataset
        made = self._made_up_to(self.openings * epoch) if self._shuffles else []
        dataset = _after_iterators(dataset, made) if made else dataset
        if self._turns and not self._cut:
            skip *= self._share.consumer[1]  # type: ignore[index]
        if self.num_batches is None:
            dataset = self._after(dataset, skip)
        elif skip:  # of a known number, which counts batches without rows
            dataset = dataset.skip(skip)
        share, job = self._share, f"{self._share.job}-{self._passes}"
        if self._turns and self._cut:
            replicas = self._replicas
            dataset = dataset.flat_map(
                lambda *parts: tf.data.Dataset.range(replicas).map(
                    lambda replica: self._slice_of(replica, *parts)
                )
            )
        elif self._cut:
            dataset = dataset.map(self._slice)
        if not self._round_robin:
            mode = tf.data.experimental.service.ShardingPolicy.DYNAMIC
            return lambda: distribute(dataset, share.address, mode, job=job)
        dataset = dataset.enumerate()
        dataset = dataset.repeat() if self._turns else dataset
        off = tf.data.experimental.service.ShardingPolicy.OFF
        return lambda: distribute(dataset, share.address, off, job=job, consumer=share.consumer)

    def _slice_of(self, replica: tf.Tensor, *parts: Any) -> Any:
        own, self._replica = self._replica, replica
        try:
            return self._slice(*parts)
        finally:
            self._replica = own

    def _each_once(self, reader: ServiceReader, lost: int) -> Iterator[Any]:
        """The elements that this rank gets; TensorFlow leaves out those of a failed worker."""
        while (element := reader.next()) is not None:
            yield element
        if self._read_config().lost_workers != lost:
            raise WorldError(
                "a worker of the tf.data service failed in this epoch, and the examples that it "
                "held were not trained on: first come first served cannot tell which. Resume from "
                "the checkpoint of the epoch before, or use data.service.round_robin=true, which "
                "loses none"
            )

    def _read_config(self) -> TfDataServiceConfig:
        return TfDataServiceConfig.read(self._service.path)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = self._iterator = None
            self._values = iter(())

    def close(self) -> None:
        self._close_reader()
        super().close()


def _share(service: TfDataServiceConfig, world: World, round_robin: bool) -> Share:
    """This rank's part.

    Raises:
        ConfigError: numbers of ranks, dispatchers and workers that do not fit together.
    """
    check_size(service, world.size)
    if service.dispatcher_side != "compute":
        raise ConfigError(
            "data.service needs dispatchers on the compute side: start `ktrainer data-service` "
            "without --dispatcher-side training, which is for scripts that call "
            "ktrainer.data.data_service",
            path="data.service.config",
        )
    if round_robin:
        _check_round_robin(service, world.size)
    else:
        _check_shared(service, world)
    several = service.dispatchers > 1
    turns = round_robin and not several and world.replicas > 1
    copy = world.rank if several else [*_replicas(world)[: world.rank]].count(world.replica)
    consumer = (world.replica, world.replicas) if turns else None
    token = world.broadcast(
        f"{service.token}-{time.time_ns():x}", 0, "name the jobs of the service"
    )
    return Share(service.addresses[world.rank if several else 0], f"{token}-{copy}", consumer)


def _check_round_robin(service: TfDataServiceConfig, ranks: int) -> None:
    """Refuse workers that would finish in an order of their own."""
    workers = service.workers_per_dispatcher
    if workers > 1:
        total = workers * service.dispatchers
        raise ConfigError(
            f"true needs one worker for each dispatcher, but {total} workers / "
            f"{service.dispatchers} dispatchers = {workers}: the order in which several workers "
            "finish is not that of the pipeline. Start the service with "
            f"-n {ranks} --dispatchers {ranks}, or with -n 1, or set "
            "data.service.round_robin=false, which reads each example once an epoch in an order "
            "that differs from run to run",
            path="data.service.round_robin",
            value=True,
        )


def _check_shared(service: TfDataServiceConfig, world: World) -> None:
    """Refuse to share the elements of several dispatchers, or with ranks of one replica."""
    several = service.dispatchers > 1
    if several or world.replicas < world.size:
        reason = (
            f"has {service.dispatchers} dispatchers: restart it with --dispatchers 1"
            if several
            else "serves ranks that hold one replica together, which must read the same batches"
        )
        raise ConfigError(
            "false shares the elements of one dispatcher among all ranks, but the service "
            f"{reason}, or set data.service.round_robin=true",
            path="data.service.round_robin",
            value=False,
        )


def _replicas(world: World) -> list[int]:
    return world.allgather(world.replica, "share the tf.data service")


def _after_iterators(dataset: tf.data.Dataset, read: Sequence[bool]) -> tf.data.Dataset:
    """`dataset` as its iterator after others: each draws a seed from its shuffles, and from those
    below others if it was `read`."""
    elements = tf.constant([*read, -1], tf.int64)  # of each iterator that are asked for

    def opened(number: tf.Tensor) -> tf.data.Dataset:
        count = elements[number]
        first = tf.data.Dataset.from_tensors(tf.zeros([], tf.int64)).repeat(count)
        # Unlike that of `take(0)`, this iterator makes one of `dataset` if it asks for nothing.
        asked = tf.data.Dataset.choose_from_datasets([dataset], first)
        return asked.filter(lambda *parts: count < 0)

    return tf.data.Dataset.range(len(read) + 1).flat_map(opened)
