"""The user's data as this process's shares of the global batches.

The parts of this package:

    make.py         chooses the feed that fits the data
    share.py        one rank's part of a batch, and the interface of a feed
    kinds.py        kinds of data, and what goes with each
    shuffling.py    the order in which arrays are drawn
    arrays.py       a feed over arrays: each replica gathers its own rows
    classweight.py  arrays taken apart as `Model.fit` does it
    streams.py      a feed over a source that every rank runs in full
    own.py          a feed over sources that differ from replica to replica

    source.py       the common face of what batches come from
    datasets.py     tf.data pipelines, cut inside of the pipeline
    shards.py       tf.data pipelines dealt out to ranks (`data.shard`)
    iterate.py      elements of a pipeline, quickly
    python_data.py  PyDatasets and generators
    workers.py      the threads or processes that a PyDataset asks for

    cursor.py       where a feed stands in its source
    prefetch.py     batches made ahead
    specs.py        the shapes that a step must be traced for
    agree.py        what ranks tell each other before a step
    digest.py       short digests of data, to compare between ranks
"""

from __future__ import annotations

from ktrainer.feed.make import make_feed
from ktrainer.feed.place import place_facts, take_place
from ktrainer.feed.share import Feed, Share, bounds, require_end
from ktrainer.feed.shuffling import ShuffleOrder, order_of

__all__ = [
    "Feed",
    "Share",
    "ShuffleOrder",
    "bounds",
    "make_feed",
    "order_of",
    "place_facts",
    "require_end",
    "take_place",
]
