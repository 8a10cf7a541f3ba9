"""Requirements of elastic training: data that can be read again, and callbacks that can move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ktrainer.data import Files
from ktrainer.data.data_arguments import kind_of
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ktrainer.data import Feed
    from ktrainer.training.run import Run


def check_data(data: Any, feed: Feed | None) -> None:
    """Refuse data that cannot be read again: an interrupted epoch is, up to where it stood.

    Args:
        data: as given.
        feed: that reads it.

    Raises:
        DataError: saying what to pass instead.
    """
    source = getattr(feed, "source", None)
    if isinstance(data, tf.data.Dataset):
        raise DataError(
            "world.heal=true needs data that can be read again in the same order, which a "
            "tf.data.Dataset that shuffles cannot: pass the function that makes it"
        )
    if source is not None and not source.reopens:
        raise DataError(
            "world.heal=true needs data that can be read again, which a generator cannot: pass "
            "the function that makes it, arrays or a PyDataset"
        )
    if kind_of(data) == "torch DataLoader" and (order := _order_of(data)) != "SequentialSampler":
        raise DataError(
            "world.heal=true needs data that can be read again in the same order, and a torch "
            f"DataLoader with {order} may draw another one: pass a function that returns an "
            "iterator over the same batches at each call or, if the loader only shuffles, its "
            "dataset, with data.batch_size and data.shuffle"
        )
    if isinstance(data, keras.utils.PyDataset) and _has_hooks(data):
        raise DataError(
            "world.heal=true needs data that can be read again in the same order, and "
            f"{type(data).__name__} may have changed its own by on_epoch_begin or on_epoch_end: "
            "remove them, and set data.shuffle, which shuffles its batches"
        )


def check_reopened(run: Run, world: ElasticWorld) -> None:
    """Refuse functions, iterables and Files whose data is not the same when it is opened again;
    tried by doing so.

    Raises:
        DataError: on all ranks, naming what is not the same.
    """
    before, call = run.state.data_facts, run.call
    kinds = {"training/": call.data, "validation/": call.validation_data}
    made = tuple(kind for kind, data in kinds.items() if _is_made_again(data))
    if not world.any(bool(before and made)):
        return
    run.feeds.reopen(run.state.feed.shuffle_order, run.feeds.lengths)
    again = run.feeds.facts()
    here = [key for key, fact in before.items() if key.startswith(made) and again.get(key) != fact]
    every = world.allgather(here, "comparison of data that is opened again")
    if changed := list(dict.fromkeys(name for names in every for name in names)):
        raise DataError(
            "world.heal=true needs data that can be read again in the same order, and this, opened "
            f"a second time, gave another {', '.join(changed)}: give its shuffles a seed "
            "(shuffle(..., seed=1)), and its random numbers a generator that each call of the "
            "function, of __iter__, or of what reads Files makes again"
        )


def _is_made_again(data: Any) -> bool:
    """Return whether the user's code makes the data each time that it is opened."""
    return callable(data) or isinstance(data, Files) or kind_of(data) == "generator"


def _order_of(loader: Any) -> str:
    """The class of sampler that orders a torch DataLoader's examples, or a setting that does."""
    if not getattr(loader, "in_order", True):
        return "in_order=False"
    chooses: Any = getattr(loader, "batch_sampler", None)
    if chooses is None or type(chooses).__name__ == "BatchSampler":
        chooses = (chooses or loader).sampler
    return type(chooses).__name__  # one that was given: torch has a `sampler` all the same


def _has_hooks(dataset: keras.utils.PyDataset) -> bool:
    """Return whether its class has hooks of epochs of its own."""
    ours, theirs = type(dataset), keras.utils.PyDataset
    return (ours.on_epoch_begin, ours.on_epoch_end) != (theirs.on_epoch_begin, theirs.on_epoch_end)


def check_callbacks(callbacks: list[Any]) -> None:
    """Refuse callbacks that cannot move to another rank.

    Raises:
        ConfigError: naming it.
    """
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ConfigError(
            "keras.callbacks.BackupAndRestore loads weights on one rank where that becomes the "
            "first: with world.heal=true use checkpoint.every instead",
            path="world.heal",
        )
