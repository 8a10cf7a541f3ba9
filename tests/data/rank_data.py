"""Data of ranks: the same on all, of each replica, and what they must refuse.

Each function takes the ranks, and returns what a script gives a Trainer there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.data import Files
from ktrainer.distributed import World
from tests.data.feeds import numbered
from tests.data.test_python_data import Numbers
from tests.data.test_torch_loader import DataLoader

HINT = tf.data.experimental.SHARD_HINT


def arrays(here: World) -> Any:
    return numbered(241)


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(241))


def ordered(here: World) -> tf.data.Dataset:
    return slices().batch(32)


def unknown_length(here: World) -> tf.data.Dataset:
    return slices().filter(lambda x, y: True).batch(32)


def seeded(here: World) -> tf.data.Dataset:
    return slices().shuffle(241, seed=1).batch(32)


def shuffled_without_seed(here: World) -> tf.data.Dataset:
    tf.random.set_seed(here.rank)  # as if the ranks had never been given one
    return slices().shuffle(241).batch(32)


def hinted(here: World) -> tf.data.Dataset:
    dataset = slices().shard(HINT, HINT).batch(32)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.HINT
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def lines(here: World, folder: str) -> tf.data.Dataset:
    files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    numbers = tf.data.TextLineDataset(files).map(lambda s: tf.strings.to_number(s, tf.int64))
    return numbers.map(lambda y: (tf.zeros([3]), y)).batch(4)


def files(here: World, folder: str) -> Files:
    def read(paths: list[str]) -> tf.data.Dataset:
        def numbers() -> Iterator[Any]:  # as of a format that TensorFlow does not know
            for path in paths:
                rows = [int(line) for line in Path(path).read_text().split()]
                yield np.zeros((len(rows), 3), np.float32), np.array(rows)

        spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None,), tf.int64))
        return tf.data.Dataset.from_generator(numbers, output_signature=spec)

    return Files(sorted(Path(folder).glob("*.txt")), read)


def of_replica(here: World, counts: list[int]) -> tf.data.Dataset:
    return slices().shard(here.replicas, here.replica).take(counts[here.replica]).batch(8)


def of_rank(here: World) -> tf.data.Dataset:
    """As under data parallelism: a script that shards by rank."""
    return slices().take(240).shard(here.size, here.rank).batch(8)


def pydataset(here: World) -> Numbers:
    return Numbers()


def loader_of_rank(here: World) -> Any:
    """A torch DataLoader that has another order on each rank, but not when it is opened first."""

    class Reordered(DataLoader):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Iterator[Any]:
            if self.opened == 1:
                self.random.manual_seed(here.rank)
            return super().__iter__()

    return Reordered()


def batches(count: int = 241) -> Iterator[Any]:
    x, y = numbered(241)
    for start in range(0, count, 32):
        stop = min(start + 32, count)
        yield x[start:stop], y[start:stop]


def generator(here: World) -> Any:
    return batches  # a function: called for every epoch


def generator_of_replica(here: World, counts: list[int]) -> Any:
    x, y = numbered(241)

    def rows_of_replica() -> Iterator[Any]:
        for row in range(here.replica, 2 * counts[here.replica], 2):
            yield x[row : row + 1], y[row : row + 1]

    return rows_of_replica


def shorter_by_rank(here: World) -> Any:
    return lambda: batches(241 - 64 * here.rank)


def one_batch_less(here: World) -> Any:
    return lambda: batches(32 * (6 - here.rank))


def more_by_rank(here: World) -> Any:
    x = np.ones((4, 3), np.float32)
    return lambda: ((x, np.zeros(4)) for _ in range(2 + here.rank // 2))


def sentences(here: World) -> Any:
    lengths = (2, 3, 4 + here.rank)
    return lambda: ((np.ones((4, length), np.float32), np.zeros(4)) for length in lengths)


def failing(here: World) -> Any:
    def fails_on_the_last_rank() -> Iterator[Any]:
        yield from batches(96)
        if here.rank == here.size - 1:
            raise OSError("disk gone")

    return fails_on_the_last_rank


def empty(here: World) -> Any:
    return lambda: iter(())
