"""Factory of feeds: chooses the one that fits the user's data and configuration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from ktrainer.config.data_service_file import TfDataServiceConfig
from ktrainer.data.array_rows import ArrayRows
from ktrainer.data.batch_source import Source, compared
from ktrainer.data.data_agreement import call_on_all_ranks
from ktrainer.data.data_arguments import kind_of, unpack_arrays
from ktrainer.data.dataset_shards import (
    Files,
    first_batch_facts,
    hinted,
    require_one_order,
    shard_dataset,
)
from ktrainer.data.dataset_source import DatasetSource
from ktrainer.data.example_rows import ExampleRows
from ktrainer.data.examples import is_of_grain, never_ends
from ktrainer.data.feed import Feed
from ktrainer.data.generator_source import GeneratorSource, LoaderSource
from ktrainer.data.indexed_feed import IndexedFeed
from ktrainer.data.per_replica_feed import PerReplicaFeed
from ktrainer.data.pydataset_source import PyDatasetSource
from ktrainer.data.replicated_feed import ReplicatedFeed
from ktrainer.data.service_source import ServiceSource
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.data.tf_data_service import require_sendable
from ktrainer.distributed.world import World
from ktrainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ktrainer.config import DataConfig


def make_feed(
    data: Any,
    *,
    world: World,
    config: DataConfig,
    training: bool,
    order: ShuffleOrder | None = None,
    class_weight: Mapping[int, float] | None = None,
    limit: int | float | None = None,
    batches_per_epoch: int | None = None,
    batch_size: int | None = None,
    check: bool = True,
    device: str | None = None,
) -> Feed:
    """The feed for a user's data. Call it on all ranks together: they may exchange facts.

    | data | `data.batch: global` | `data.batch: per_worker` |
    |---|---|---|
    | arrays, random access | a step is `batch_size` rows | `batch_size` rows a replica |
    | tf.data, PyDataset, generator | every rank runs it, takes its slice | the replica's own |

    A rank is a replica, unless several hold one copy of the model together (`World.replica`): those
    get the same batches, and `per_worker` data must be the same on them.

    `data.shard: element | file` shards a tf.data pipeline instead: see
    `ktrainer.data.dataset_shards`.
    Arrays and random-access data are the same on every rank, which reads its own rows only.
    They, and the batches of a PyDataset, are shuffled here, for training; without, the slices of a
    batch in the order of ranks are the batch.

    Args:
        data: tf.data.Dataset; arrays `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each an
            array or a nested structure of them (a list is several inputs);
            keras.utils.PyDataset; a torch DataLoader; random-access data, see
            `ktrainer.data.Examples`; `ktrainer.data.Files`; a generator, another iterable, or a
            function that returns one (or a Dataset).
        world: all ranks.
        config: the `data` section of the configuration.
        training: shuffle arrays, let endless streams continue from epoch to epoch, honour
            `data.drop_remainder`.
        order: of arrays, random-access data and PyDatasets, for training.
        class_weight: class -> weight; as in `Model.fit`.
        limit: global batches an epoch (int), or a fraction of them (float; known lengths only).
        batches_per_epoch: after so many the next epoch continues; instead of `limit`.
        batch_size: instead of `config.batch_size`; arrays and random-access data only.
        check: compare what ranks see in every epoch, where they must see the same.
        device: where the next batches are copied to while a step runs, unless `data.prefetch` is
            0; None: nowhere.

    Raises:
        DataError: data that cannot be trained on.
        ConfigError: `data.shard` asks for what this kind of data cannot do.
    """
    settings = _Settings(
        world,
        config,
        training,
        order or ShuffleOrder(),
        class_weight,
        limit,
        batches_per_epoch,
        batch_size,
        check,
        device if config.prefetch else None,
    )
    ready = call_on_all_ranks(
        world, lambda: _prepare(data, settings), kind=lambda ready: ready.kind
    )
    feed = ready.make()
    source = getattr(feed, "source", None)
    if batches_per_epoch is not None and not (source is not None and source.endless):
        if source is not None:
            source.openings = 1
        feed.continue_epochs(batches_per_epoch)
    return feed


class _Ready(NamedTuple):
    """Data that has been opened: its kind, and a function that makes its feed."""

    kind: str
    make: Callable[[], Feed]


class _Settings(NamedTuple):
    world: World
    config: DataConfig
    training: bool
    order: ShuffleOrder
    class_weight: Mapping[int, float] | None
    limit: int | float | None
    batches_per_epoch: int | None
    batch_size: int | None
    check: bool
    device: str | None

    @property
    def several(self) -> bool:
        """True if there are several replicas, which train on different rows."""
        return self.world.replicas > 1

    @property
    def service(self) -> TfDataServiceConfig | None:
        """The tf.data service that computes training data, if one does: waits for its file."""
        service = self.config.service
        if service.config is None or not self.training:
            return None
        return TfDataServiceConfig.read(service.config, True, service.deadline)

    def feed_maker(
        self, source: Source, per_replica: bool, facts: dict[str, str] | None = None
    ) -> Callable[[], Feed]:
        """A function that makes the feed of a per-replica or replicated source."""
        limit = self.batches_per_epoch if source.endless and self.batches_per_epoch else self.limit
        world, training = self.world, self.training
        if per_replica:
            return lambda: PerReplicaFeed(
                source, world=world, limit=limit, training=training, facts=facts
            )
        return lambda: ReplicatedFeed(
            source, world=world, limit=limit, training=training, check=self.check
        )


def _prepare(data: Any, settings: _Settings) -> _Ready:
    """Open the data: runs the user's code, exchanges nothing."""
    kind, x_alone, infinite = kind_of(data), is_of_grain(data), never_ends(data)
    make = _called(data, kind)
    if make is not None:
        made = make()
        name = getattr(data, "__qualname__", type(data).__name__)
        data = made if isinstance(made, tf.data.Dataset) else _with_first(make, made, name)
    if isinstance(data, (tf.data.Dataset, Files)):
        return _Ready("tf.data.Dataset", _from_dataset(data, settings))
    if settings.training and settings.config.service.config is not None:
        raise ConfigError(
            f"a tf.data service computes tf.data pipelines, not {kind}: pass a tf.data.Dataset, or "
            "set data.service.config=null",
            path="data.service.config",
            value=settings.config.service.config,
        )
    if kind in ("arrays", "random access"):
        feed = _from_rows(data, kind, settings)
        return _Ready(kind, lambda: feed)
    return _Ready(kind, _from_python(data, settings, x_alone, infinite))


def _called(data: Any, kind: str) -> Callable[[], Any] | None:
    """The function that returns the data of each epoch, if there is one."""
    if kind != "generator" or hasattr(data, "__next__"):
        return None
    return data if callable(data) else lambda: iter(data)  # an iterable is as good as a function


def _with_first(make: Callable[[], Any], made: Any, name: str) -> Callable[[], Any]:
    """`make` under the name of the user's data, with the result that exists already at the first
    call."""
    results = itertools.chain([made], iter(make, object()))

    def again() -> Any:
        return next(results)

    again.__qualname__ = name
    return again


def _from_dataset(data: tf.data.Dataset | Files, settings: _Settings) -> Callable[[], Feed]:
    config, world = settings.config, settings.world
    by: str | None = config.shard
    if not isinstance(data, Files):
        dataset = data
    elif config.shard == "file":
        by, dataset = None, data.dataset(world.replica, world.replicas)
    else:
        dataset = data.dataset()
    cut = config.shard == "element" and hinted(dataset)  # runs only once it is cut, even for one
    sharded = settings.several and config.shard != "batch"
    per_replica = sharded or (settings.several and config.batch == "per_worker")
    facts: dict[str, str] = {}
    if sharded and config.shard == "element" and not cut:
        require_one_order(dataset)
        facts = first_batch_facts(dataset) if settings.check else {}
    if sharded or cut:
        rebatch = config.batch == "global"
        dataset = shard_dataset(dataset, world=world, by=by, rebatch=rebatch)
    shares: dict[str, Any] = {
        "world": world,
        "sliced": not per_replica,
        "class_weight": settings.class_weight,
        "prefetch": config.prefetch,
        "device": settings.device,
    }
    if (service := settings.service) is not None:
        return _from_service(dataset, settings, shares, facts, service)
    if compared(world, not per_replica):
        require_one_order(dataset)
    return settings.feed_maker(DatasetSource(dataset, **shares), per_replica, facts)


def _from_service(
    dataset: tf.data.Dataset,
    settings: _Settings,
    shares: dict[str, Any],
    facts: dict[str, str],
    service: TfDataServiceConfig,
) -> Callable[[], Feed]:
    """The feed of a pipeline that a tf.data service computes; its making agrees on the jobs."""
    round_robin = settings.config.service.round_robin
    require_sendable(dataset)
    if settings.config.shard != "batch" and service.dispatchers < settings.world.size:
        raise ConfigError(
            "gives each rank a pipeline of its own, but the tf.data service has one dispatcher, "
            "which computes one pipeline for all: set data.shard=batch, or start it with "
            f"--dispatchers {settings.world.size}",
            path="data.shard",
            value=settings.config.shard,
        )
    if settings.batches_per_epoch is not None and not round_robin:
        raise ConfigError(
            "passes that are read first come first served differ in length and cannot be continued "
            "inside, as epochs of steps_per_epoch batches are: leave steps_per_epoch out (each "
            "epoch is a pass, or trainer.limit_train_batches batches of one), or set "
            "data.service.round_robin=true",
            path="data.service.round_robin",
            value=False,
        )
    uneven = settings.several and (not shares["sliced"] or not round_robin)

    def make() -> Feed:
        source = ServiceSource(
            dataset,
            service=service,
            round_robin=round_robin,
            deadline=settings.config.service.deadline,
            **shares,
        )
        return settings.feed_maker(source, uneven, facts)()

    return make


_SOURCES: dict[str, Callable[..., Source]] = {
    "PyDataset": PyDatasetSource,
    "torch DataLoader": LoaderSource,
    "generator": GeneratorSource,
}


def _from_python(
    data: Any, settings: _Settings, x_alone: bool, infinite: bool
) -> Callable[[], Feed]:
    """The feed of what Python code makes.

    Args:
        x_alone: a batch of a generator may be `x`, as it may in Keras where Grain makes it.
        infinite: it never ends, though its source cannot know.
    """
    config = settings.config
    if config.shard != "batch" and settings.several:
        raise ConfigError(
            f"a {type(data).__name__} cannot be sharded; only tf.data pipelines can. "
            "Set data.shard=batch (and no backend.auto_shard), or give each rank data of its own "
            "and set data.batch=per_worker",
            path="data.shard",
            value=config.shard,
        )
    per_replica = settings.several and config.batch == "per_worker"
    kind = kind_of(data)
    options = {"check": settings.check, "x_alone": x_alone} if kind == "generator" else {}
    source = _SOURCES[kind](
        data,
        **options,
        world=settings.world,
        sliced=not per_replica,
        class_weight=settings.class_weight,
        prefetch=config.prefetch,
        device=settings.device,
    )
    source.infinite |= infinite
    make = settings.feed_maker(source, per_replica)
    if not (settings.training and config.shuffle and isinstance(source, PyDatasetSource)):
        return make
    return lambda: _shuffled(make(), settings.order)


def _shuffled(feed: Feed, order: ShuffleOrder) -> Feed:
    feed.set_shuffle_order(order)
    return feed


def _from_rows(data: Any, kind: str, settings: _Settings) -> IndexedFeed:
    config, training = settings.config, settings.training
    batch_size = settings.batch_size or config.batch_size
    if batch_size < 1:
        raise DataError(f"a batch needs at least one row, not {batch_size}")
    per_worker = config.batch == "per_worker"
    weights = settings.class_weight
    rows = ArrayRows(unpack_arrays(data, weights)) if kind == "arrays" else None
    return IndexedFeed(
        rows or ExampleRows(data, weights),
        world=settings.world,
        global_batch=batch_size * (settings.world.replicas if per_worker else 1),
        shuffle=config.shuffle if training else False,
        order=settings.order,
        limit=settings.limit,
        drop_remainder=training and config.drop_remainder,
        prefetch=config.prefetch,
        device=settings.device,
    )
