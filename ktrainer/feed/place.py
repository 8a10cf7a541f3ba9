"""What a number of updates into an epoch means: which examples are behind it, which are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktrainer.errors import CheckpointError
from ktrainer.feed.arrays import ArrayFeed
from ktrainer.feed.own import OwnFeed
from ktrainer.feed.share import Feed
from ktrainer.feed.shuffling import ShuffleOrder

if TYPE_CHECKING:
    from ktrainer.config import Config

_BATCHES = "batches in an epoch"  # compared where both are known


def place_facts(feed: Feed, config: Config) -> dict[str, Any]:
    """All that a position inside an epoch depends on, by name, as a JSON-able dict.

    Not the number of processes, unless each has data of its own: they share a global batch.
    """
    facts: dict[str, Any] = {"trainer.accumulate": config.trainer.accumulate}
    if feed.batches_per_epoch is not None:
        facts["steps_per_epoch"] = feed.batches_per_epoch
    if feed.first_epoch:
        facts["initial_epoch"] = feed.first_epoch
    if feed.source_batches is not None and not isinstance(feed, ArrayFeed):
        facts[_BATCHES] = feed.source_batches
    if feed.shuffle_order is not None:
        facts |= {"seed": feed.shuffle_order.seed, "order of Model.fit": feed.shuffle_order.keras}
    if isinstance(feed, ArrayFeed):
        facts |= {"rows": feed.rows, "examples in a batch": feed.global_batch}
        facts |= {"data.shuffle": feed.shuffle}
        return facts
    if isinstance(feed, OwnFeed):
        facts |= {"data.batch": config.data.batch, "data.shard": config.data.shard}
        facts |= {"processes with data of their own": feed.world.replicas}
    return facts


def take_place(feed: Feed, config: Config, state: Mapping[str, Any]) -> None:
    """Before a run goes on from the `state` of a checkpoint: have its data in the same order.

    Where no seed is set, the order is the one of then.

    Raises:
        CheckpointError: it stands inside an epoch, of which other examples would be left now.
    """
    saved, progress = state.get("data"), state["progress"]
    if saved is None:
        return  # nobody counted, or an older version did not say
    chosen = config.seed is not None or (
        feed.shuffle_order is not None and feed.shuffle_order.keras
    )
    if feed.shuffle_order is not None and not chosen and "seed" in saved:
        feed.set_shuffle_order(
            ShuffleOrder(int(saved["seed"]), bool(saved.get("order of Model.fit")))
        )
    if feed.source_batches is None and isinstance(saved.get(_BATCHES), int):
        feed.source_batches = saved[_BATCHES]  # which may have been learned by reading all of it
    now = place_facts(feed, config)
    changed = [
        f"{name}: {saved.get(name, 'not used')} then, {now.get(name, 'not used')} now"
        for name in dict.fromkeys([*saved, *now])
        if saved.get(name) != now.get(name)
        and not (name == _BATCHES and None in (saved.get(name), now.get(name)))
    ]
    if changed and progress["batch"]:
        raise CheckpointError(
            f"the checkpoint stands after update {progress['batch']} of epoch "
            f"{progress['epoch'] + 1}, and the rest of this epoch would not be the examples that "
            "were left then:\n  " + "\n  ".join(changed) + "\nSet them as they were; or go on from "
            "a checkpoint at the end of an epoch (checkpoint.resume=PATH), or start afresh "
            "(checkpoint.resume=never)."
        )
