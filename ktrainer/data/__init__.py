"""The user's data as this process's local batches.

feed_factory.py        `make_feed`: chooses a feed for the data and the configuration
feed.py                the interface of all feeds; local_batch.py: what they give
indexed_feed.py        rows by index; array_rows.py, example_rows.py: of arrays; of other data
examples.py            random-access data sets: torch, Hugging Face, Grain, ArrayRecord
source_feed.py         batches of a source:
replicated_feed.py     - that every rank runs in full, each taking its slice
per_replica_feed.py    - that differ from replica to replica
batch_source.py        the interface of sources; python_source.py: of those made by Python
dataset_source.py, pydataset_source.py, generator_source.py   tf.data; PyDataset; others, torch
one_shot_iterator.py   a generator that several calls read
dataset_shards.py, dataset_iterator.py   parts of a tf.data pipeline; its elements and its state
dataset_shuffles.py, derived_dataset.py  the shuffles in one; a map that opens fast
tf_data_service.py, service_source.py, service_reader.py   pipelines that a tf.data service computes
distributed_dataset.py a rank's rows, for loops of the user's own
stage_times.py         the slowest stage of the input
prefetch_thread.py, shuffling.py, batch_specs.py   batches ahead of time; their order; their shapes
data_arguments.py      what `Model.fit` accepts as data
data_agreement.py, data_digests.py   whether ranks have the same data
rank_consistency.py    compares data, model, configuration, versions and weights of the ranks
resume_position.py     where a resumed run continues
"""

from __future__ import annotations

from ktrainer.config.data_service_file import TfDataServiceConfig
from ktrainer.data.dataset_shards import Files, rank_files
from ktrainer.data.examples import Examples
from ktrainer.data.feed import Feed, require_batches, require_end, warn_of_short_epochs
from ktrainer.data.feed_factory import make_feed
from ktrainer.data.local_batch import LocalBatch, bounds
from ktrainer.data.resume_position import data_fingerprint, restore_position
from ktrainer.data.shuffling import ShuffleOrder, order_of
from ktrainer.data.tf_data_service import data_service, send_to_data_service

__all__ = [
    "Examples",
    "Feed",
    "Files",
    "LocalBatch",
    "ShuffleOrder",
    "TfDataServiceConfig",
    "bounds",
    "data_fingerprint",
    "data_service",
    "make_feed",
    "order_of",
    "rank_files",
    "require_batches",
    "require_end",
    "restore_position",
    "send_to_data_service",
    "warn_of_short_epochs",
]
