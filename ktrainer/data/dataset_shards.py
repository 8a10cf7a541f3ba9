"""Shards of a tf.data pipeline, so that no rank has to run all of it.

`data.shard: element`
    Rank `r` of `n` takes every `n`-th batch of the pipeline, from the `r`-th on
    (`dataset.shard(n, r)`). A pipeline whose options ask for `AutoShardPolicy.HINT` is cut where
    it says `dataset.shard(tf.data.experimental.SHARD_HINT, tf.data.experimental.SHARD_HINT)`
    instead, which may be before its expensive part.
`data.shard: file`
    Rank `r` reads every `n`-th input file (`AutoShardPolicy.FILE`): the pipeline must read files,
    at least one a rank, by TFRecordDataset, TextLineDataset, FixedLengthRecordDataset or
    `list_files`.

    Of `ktrainer.data.Files` it reads `rank_files(files, r, n)`, whatever the function that reads
    them does.

With `data.batch: global` each of a rank's batches is then cut into `n` parts, one a step: a step
still trains on the user's batch size in all, every row is seen once an epoch, but the rows of one
step come from `n` of the user's batches. With `data.batch: per_worker` a step takes one whole batch
a rank.

"Rank" stands for replica here: if several ranks hold one copy of the model together, all of them
get the shard of their replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ktrainer.data.data_digests import batch_facts
from ktrainer.data.derived_dataset import DerivedDataset
from ktrainer.data.local_batch import graph_slice, leaf_names, rows_in_graph
from ktrainer.distributed.world import World
from ktrainer.errors import DataError

_Policy = tf.data.experimental.AutoShardPolicy
_ANY_ORDER = b"deterministic\x12\x07\x12\x05false"  # an operation's attribute, in a graph
_MOST_BYTES = 2**26  # of tensors that are written out to look at a graph


@dataclass(frozen=True)
class Files:
    """A data set of files: TFRecords, text, Parquet, ...

    With `data.shard: file` each rank reads its own files, else all of them.

    Args:
        files: their paths, in the same order on every rank; the order is kept.
        read: from a list of paths to a `tf.data.Dataset` of batches.
    """

    files: Sequence[str | os.PathLike[str]]
    read: Callable[[list[str]], tf.data.Dataset]

    def dataset(self, replica: int = 0, replicas: int = 1) -> tf.data.Dataset:
        """The pipeline of one of several replicas.

        Raises:
            DataError: there are no files, or fewer than replicas, or `read` returns no pipeline.
        """
        made = self.read(rank_files(self.files, replica, replicas))
        if not isinstance(made, tf.data.Dataset):
            raise DataError(
                f"the function that reads Files must return a tf.data.Dataset of batches, not a "
                f"{type(made).__name__}; tf.data.Dataset.from_generator makes one of Python code"
            )
        return made


def rank_files(files: Sequence[str | os.PathLike[str]], rank: int, size: int) -> list[str]:
    """The files that a rank reads: every `size`-th, from the `rank`-th on.

    Raises:
        DataError: there are fewer files than ranks, or none.
    """
    paths = [os.fspath(file) for file in files]
    if len(paths) < size or not paths:
        raise DataError(
            f"{len(paths)} files cannot be shared by {size} ranks, as each reads at least one: "
            f"{max(0, size - len(paths))} more are needed. Write more, smaller files; use at most "
            f"{max(1, len(paths))} ranks; or set data.shard=element or data.shard=batch"
            if paths
            else "the list of files is empty; there is nothing to train on"
        )
    return paths[rank::size]


def shard_dataset(
    dataset: tf.data.Dataset, *, world: World, by: str | None, rebatch: bool
) -> tf.data.Dataset:
    """This rank's shard of a pipeline of batches.

    Args:
        by: `"element"` or `"file"`; None: it is one already.
        rebatch: cut each batch into as many parts as there are ranks.

    Raises:
        DataError: `file`, but the pipeline reads no files, or fewer than there are ranks.
    """
    infinite = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    if by is None:
        pass
    elif by == "file" or hinted(dataset):
        dataset = _auto_shard(dataset, world, _Policy.FILE if by == "file" else _Policy.HINT)
    else:
        dataset = dataset.shard(world.replicas, world.replica)
    if rebatch and world.replicas > 1:
        dataset = split_batches(dataset, world.replicas)
    if infinite:  # which neither a rewritten graph nor flat_map tells
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        dataset = dataset.apply(endless)
    return dataset


def split_batches(dataset: tf.data.Dataset, parts: int) -> tf.data.Dataset:
    """Each batch as so many smaller ones, none empty, with the same rows in the same order."""
    return dataset.flat_map(lambda *batch: _parts(batch, dataset, parts))


def hinted(dataset: tf.data.Dataset) -> bool:
    """Return whether the pipeline itself says where to shard it; it does not run otherwise."""
    return bool(dataset.options().experimental_distribute.auto_shard_policy == _Policy.HINT)


def require_one_order(dataset: tf.data.Dataset) -> None:
    """Refuse a pipeline whose order differs from rank to rank, where ranks share its batches.

    Raises:
        DataError: its options, or one of its operations, say `deterministic=False`.
    """
    if dataset.options().deterministic is False or _in_any_order(dataset):
        raise DataError(
            "the tf.data pipeline asks for deterministic=False, so its order differs from rank to "
            "rank, and their parts of its batches would have some rows twice, others never: leave "
            "deterministic=False out, in its operations and its options; or let each rank read "
            "files of its own (data.shard=file)"
        )


def _in_any_order(dataset: tf.data.Dataset) -> bool:
    if getattr(dataset, "_deterministic", None) == "false":
        return True
    graphs = [each.function.graph.as_graph_def() for each in dataset._functions()]
    written = [graph.SerializeToString() for graph in graphs]
    if "ParallelInterleave" in type(dataset).__name__ and _bytes_held(dataset) < _MOST_BYTES:
        ignore = tf.data.experimental.ExternalStatePolicy.IGNORE  # it keeps no `_deterministic`
        written.append(dataset._as_serialized_graph(external_state_policy=ignore).numpy())
    return any(_ANY_ORDER in each for each in written) or any(map(_in_any_order, dataset._inputs()))


def _bytes_held(dataset: tf.data.Dataset) -> int:
    """Bytes of the tensors in memory that a pipeline reads."""
    own = getattr(dataset, "_tensors", ())
    return sum(each.dtype.size * (each.shape.num_elements() or 0) for each in own) + sum(
        map(_bytes_held, dataset._inputs())
    )


def first_batch_facts(dataset: tf.data.Dataset) -> dict[str, str]:
    """Digests of the first batch of the whole pipeline, on which all ranks must agree."""
    for batch in dataset.take(1):
        return batch_facts(batch)
    return {}


def _auto_shard(dataset: tf.data.Dataset, world: World, policy: Any) -> tf.data.Dataset:
    spec = dataset.element_spec
    flat = [part for leaf in tf.nest.flatten(spec) for part in _flat_types(leaf)]
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=world.replicas,
            index=world.replica,
            auto_shard_policy=int(policy.value),
            num_replicas=world.replicas,
            output_types=[dtype for dtype, _ in flat],
            output_shapes=[shape for _, shape in flat],
        )
        sharded = DerivedDataset(dataset, variant, spec)
        iter(sharded)
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0].split("}} ")[-1].split(": goo.gle")[0]
        raise DataError(
            f"the pipeline cannot be sharded by {policy.name.lower()} to {world.replicas} ranks: "
            f"{reason}. It must read at least {world.replicas} files, directly; otherwise use "
            "data.shard=element or data.shard=batch"
        ) from error
    return sharded


def _flat_types(spec: Any) -> list[tuple[Any, Any]]:
    if isinstance(spec, tf.TensorSpec):
        return [(spec.dtype, spec.shape)]
    # Ragged and sparse tensors travel through tf.data as one variant each.
    return [(tf.variant, tf.TensorShape(None))]


@tf.autograph.experimental.do_not_convert
def _parts(parts: tuple[Any, ...], dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    batch = parts if isinstance(dataset.element_spec, tuple) else parts[0]
    rows = _common_rows(batch, size)

    def part(index: tf.Tensor) -> Any:
        return graph_slice(batch, rows, index, size)

    return tf.data.Dataset.range(tf.minimum(rows, size)).map(part)


def _common_rows(batch: Any, parts: int) -> tf.Tensor:
    """The rows of a batch, of which each array has as many, or running this fails."""
    named = zip(leaf_names(batch), tf.nest.flatten(batch), strict=True)
    rows = {name: rows_in_graph(leaf) for name, leaf in named if leaf is not None}
    counts = tf.stack(list(rows.values()))
    what = (
        f"a batch cannot be cut into {parts} parts by its first axis, which is not examples, as it "
        f"has another length in each array ({', '.join(rows)}): set data.batch=per_worker, so that "
        "each rank trains on whole batches. The lengths:"
    )
    equal = tf.debugging.Assert(tf.reduce_all(counts == counts[0]), [what, counts])
    with tf.control_dependencies([equal]):
        return tf.identity(counts[0])
