"""Choose the feed that fits the user's data and configuration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from ktrainer.errors import ConfigError, DataError
from ktrainer.feed.agree import together
from ktrainer.feed.arrays import ArrayFeed
from ktrainer.feed.classweight import unpack_arrays
from ktrainer.feed.datasets import DatasetSource
from ktrainer.feed.kinds import kind_of
from ktrainer.feed.own import OwnFeed
from ktrainer.feed.python_data import GeneratorSource, LoaderSource, PyDatasetSource
from ktrainer.feed.shards import deal, first_batch_facts, hinted
from ktrainer.feed.share import Feed
from ktrainer.feed.shuffling import ShuffleOrder
from ktrainer.feed.source import Source
from ktrainer.feed.streams import StreamFeed
from ktrainer.world.base import World

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
) -> Feed:
    """The feed for a user's data. Call it on all ranks together: they may exchange facts.

    | data | `data.batch: global` | `data.batch: per_worker` |
    |---|---|---|
    | arrays, on every rank the same | a step is `batch_size` rows | `batch_size` rows a replica |
    | tf.data, PyDataset, generator | every rank runs it, takes its slice | the replica's own |

    A rank is a replica, unless several hold one copy of the model together (`World.replica`): those
    get the same shares, and `per_worker` data must be the same on them.

    `data.shard: element | file` deals a tf.data pipeline out instead: see `ktrainer.feed.shards`.
    Only arrays are shuffled here, and only for training; without, the slices of a batch in the
    order of ranks are the batch.

    Args:
        data: tf.data.Dataset; arrays `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each an
            array or a nested structure of them (a list is several inputs);
            keras.utils.PyDataset; a torch DataLoader; a generator, another iterable, or a
            function that returns one (or a Dataset).
        world: the ranks that share the data.
        config: the `data` section of the configuration.
        training: shuffle arrays, let endless streams go on from epoch to epoch, honour
            `data.drop_remainder`.
        order: of arrays and PyDatasets, for training.
        class_weight: class -> weight; as in `Model.fit`.
        limit: global batches an epoch (int), or a fraction of them (float; known lengths only).
        batches_per_epoch: after so many the next epoch continues; instead of `limit`.
        batch_size: instead of `config.batch_size`; arrays only.
        check: compare what ranks see in every epoch, where they must see the same.

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
    )
    ready = together(world, lambda: _prepare(data, settings), kind=lambda ready: ready.kind)
    feed = ready.make()
    source = getattr(feed, "source", None)
    if batches_per_epoch is not None and not (source is not None and source.endless):
        if source is not None:
            source.openings = 1
        feed.continue_epochs(batches_per_epoch)
    return feed


class _Ready(NamedTuple):
    """Data that has been opened: its kind, and what makes its feed."""

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

    @property
    def several(self) -> bool:
        """Whether the data is shared out; all ranks of one replica train on the same."""
        return self.world.replicas > 1

    def own(self, source: Source, facts: dict[str, str] | None = None) -> Callable[[], Feed]:
        """Makes the feed of a source that is this replica's own."""
        limit = self.batches_per_epoch if source.endless and self.batches_per_epoch else self.limit
        return lambda: OwnFeed(
            source, world=self.world, limit=limit, training=self.training, facts=facts
        )

    def same(self, source: Source) -> Callable[[], Feed]:
        """Makes the feed of a source that all ranks run."""
        limit = self.batches_per_epoch if source.endless and self.batches_per_epoch else self.limit
        return lambda: StreamFeed(
            source, world=self.world, limit=limit, training=self.training, check=self.check
        )


def _prepare(data: Any, settings: _Settings) -> _Ready:
    """Open the data: runs the user's code, exchanges nothing."""
    kind = kind_of(data)
    make = _called(data, kind)
    if make is not None:
        made = make()
        data = made if isinstance(made, tf.data.Dataset) else _with_first(make, made)
    if isinstance(data, tf.data.Dataset):
        return _Ready("tf.data.Dataset", _from_dataset(data, settings))
    if kind == "arrays":
        feed = _from_arrays(data, settings)
        return _Ready(kind, lambda: feed)
    return _Ready(kind, _from_python(data, settings))


def _called(data: Any, kind: str) -> Callable[[], Any] | None:
    """The function that gives the data anew for each epoch, if there is one."""
    if kind != "generator" or hasattr(data, "__next__"):
        return None
    return data if callable(data) else lambda: iter(data)  # an iterable is as good as a function


def _with_first(make: Callable[[], Any], made: Any) -> Callable[[], Any]:
    """`make`, giving the already made result at the first call."""
    results = itertools.chain([made], iter(make, object()))
    return lambda: next(results)


def _from_dataset(dataset: tf.data.Dataset, settings: _Settings) -> Callable[[], Feed]:
    config, world = settings.config, settings.world
    cut = config.shard == "element" and hinted(dataset)  # runs only once it is cut, into one even
    dealt = settings.several and config.shard != "batch"
    own = dealt or (settings.several and config.batch == "per_worker")
    facts: dict[str, str] = {}
    if dealt and config.shard == "element" and not cut and settings.check:
        facts = first_batch_facts(dataset)
    if dealt or cut:
        rebatch = config.batch == "global"
        dataset = deal(dataset, world=world, by=config.shard, rebatch=rebatch)
    source = DatasetSource(
        dataset,
        world=world,
        sliced=not own,
        class_weight=settings.class_weight,
        prefetch=config.prefetch,
    )
    return settings.own(source, facts) if own else settings.same(source)


_SOURCES: dict[str, Callable[..., Source]] = {
    "PyDataset": PyDatasetSource,
    "torch DataLoader": LoaderSource,
    "generator": GeneratorSource,
}


def _from_python(data: Any, settings: _Settings) -> Callable[[], Feed]:
    config = settings.config
    if config.shard != "batch" and settings.several:
        raise ConfigError(
            f"a {type(data).__name__} cannot be dealt out to ranks; only tf.data pipelines can. "
            "Set data.shard=batch (and no backend.auto_shard), or give each rank data of its own "
            "and set data.batch=per_worker",
            path="data.shard",
            value=config.shard,
        )
    own = settings.several and config.batch == "per_worker"
    source = _SOURCES[kind_of(data)](
        data,
        world=settings.world,
        sliced=not own,
        class_weight=settings.class_weight,
        prefetch=max(1, config.prefetch),
    )
    make = settings.own(source) if own else settings.same(source)
    if not (settings.training and config.shuffle and isinstance(source, PyDatasetSource)):
        return make
    return lambda: _shuffled(make(), settings.order)


def _shuffled(feed: Feed, order: ShuffleOrder) -> Feed:
    feed.set_shuffle_order(order)
    return feed


def _from_arrays(data: Any, settings: _Settings) -> ArrayFeed:
    config, training = settings.config, settings.training
    batch_size = settings.batch_size or config.batch_size
    if batch_size < 1:
        raise DataError(f"a batch needs at least one row, not {batch_size}")
    per_worker = config.batch == "per_worker"
    return ArrayFeed(
        unpack_arrays(data, settings.class_weight),
        world=settings.world,
        global_batch=batch_size * (settings.world.replicas if per_worker else 1),
        shuffle=config.shuffle if training else False,
        order=settings.order,
        limit=settings.limit,
        drop_remainder=training and config.drop_remainder,
        prefetch=config.prefetch,
    )
