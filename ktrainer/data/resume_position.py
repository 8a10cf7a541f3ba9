"""The data position after a number of updates, and a fingerprint of what it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktrainer.data.feed import Feed
from ktrainer.data.indexed_feed import IndexedFeed
from ktrainer.data.per_replica_feed import PerReplicaFeed
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.errors import CheckpointError

if TYPE_CHECKING:
    from ktrainer.config import Config

_BATCHES = "batches in an epoch"  # compared where both are known


def data_fingerprint(feed: Feed, config: Config) -> dict[str, Any]:
    """All that a position inside an epoch depends on, by name, as a JSON-able dict.

    Not the number of processes, unless each has data of its own: they share a global batch.
    """
    facts: dict[str, Any] = {"trainer.accumulate": config.trainer.accumulate}
    if feed.batches_per_epoch is not None:
        facts["steps_per_epoch"] = feed.batches_per_epoch
    if feed.first_epoch:
        facts["initial_epoch"] = feed.first_epoch
    if feed.source_batches is not None and not isinstance(feed, IndexedFeed):
        facts[_BATCHES] = feed.source_batches
    if feed.shuffle_order is not None:
        facts |= {"seed": feed.shuffle_order.seed, "order of Model.fit": feed.shuffle_order.keras}
    if isinstance(feed, IndexedFeed):
        facts |= {"rows": feed.rows, "examples in a batch": feed.global_batch}
        facts |= {"data.shuffle": feed.shuffle}
        return facts
    if isinstance(feed, PerReplicaFeed):
        facts |= {"data.batch": config.data.batch, "data.shard": config.data.shard}
        facts |= {"processes with data of their own": feed.world.replicas}
    return facts


def restore_position(feed: Feed, config: Config, state: Mapping[str, Any]) -> None:
    """Restore the order of the data before a run resumes from the `state` of a checkpoint.

    If no seed is set, the checkpoint's is used.

    Raises:
        CheckpointError: it is inside an epoch whose remaining examples would be others now.
    """
    saved, progress = state.get("data"), state["progress"]
    if saved is None:
        return  # saved by a loop that does not count batches
    chosen = config.seed is not None or (
        feed.shuffle_order is not None and feed.shuffle_order.keras
    )
    if feed.shuffle_order is not None and not chosen and "seed" in saved:
        feed.set_shuffle_order(
            ShuffleOrder(int(saved["seed"]), bool(saved.get("order of Model.fit")))
        )
    if feed.source_batches is None and isinstance(saved.get(_BATCHES), int):
        feed.source_batches = saved[_BATCHES]  # which may have been learned by reading all of it
    now = data_fingerprint(feed, config)
    changed = [
        f"{name}: {saved.get(name, 'not used')} then, {now.get(name, 'not used')} now"
        for name in dict.fromkeys([*saved, *now])
        if saved.get(name) != now.get(name)
        and not (name == _BATCHES and None in (saved.get(name), now.get(name)))
    ]
    if changed and progress["batch"]:
        raise CheckpointError(
            f"the checkpoint stands after update {progress['batch']} of epoch "
            f"{progress['epoch'] + 1}, and the rest of this epoch would be other examples than "
            "then:\n  " + "\n  ".join(changed) + "\nSet them as they were; or resume from a "
            "checkpoint at the end of an epoch (checkpoint.resume=PATH), or start afresh "
            "(checkpoint.resume=never)."
        )
