"""The data position after a number of updates, and a fingerprint of what it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ktrainer.data.feed import Feed, place_in_passes
from ktrainer.data.indexed_feed import IndexedFeed
from ktrainer.data.per_replica_feed import PerReplicaFeed
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.errors import CheckpointError

if TYPE_CHECKING:
    from ktrainer.config import Config

_BATCHES = "batches in an epoch"  # of a whole pass; compared where both are known
_EXHAUSTED = "exhausted"  # whether all of an iterator was read; not compared


def data_fingerprint(feed: Feed, config: Config) -> dict[str, Any]:
    """All that a position inside a pass over the data depends on, by name, as a JSON-able dict.

    Not the number of processes, unless each has data of its own: they share a global batch.
    """
    facts: dict[str, Any] = {"trainer.accumulate": config.trainer.accumulate}
    if feed.batches_per_epoch is not None:
        facts["steps_per_epoch"] = feed.batches_per_epoch
    if feed.first_epoch:
        facts["initial_epoch"] = feed.first_epoch
    if feed.source_batches is not None:
        facts[_BATCHES] = feed.source_batches
    if feed.exhausted:
        facts[_EXHAUSTED] = True
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

    If no seed was chosen, the order is the checkpoint's.

    Raises:
        CheckpointError: it is inside an epoch, or with `steps_per_epoch` inside a pass, whose
            remaining examples would be others now.
    """
    saved, progress = state.get("data"), state["progress"]
    if saved is None:
        return  # saved by a loop that does not count batches
    order = feed.shuffle_order
    if order is not None and not order.keras and "seed" in saved:  # no seed was chosen
        feed.set_shuffle_order(
            ShuffleOrder(int(saved["seed"]), bool(saved.get("order of Model.fit")))
        )
    if feed.source_batches is None and isinstance(saved.get(_BATCHES), int):
        feed.source_batches = saved[_BATCHES]  # which may have been learned by reading all of it
    now, epoch, batch = data_fingerprint(feed, config), progress["epoch"], progress["batch"]
    # A new iterator would be trained on from its beginning; with `initial_epoch` it is.
    if not batch and epoch > feed.first_epoch and _is_one_pass(feed):
        feed.exhausted = bool(saved.get(_EXHAUSTED))
    changed = _changes(saved, now, inside_epoch=batch > 0)
    if not changed:
        return
    if not batch and epoch == feed.first_epoch:
        return  # `initial_epoch`: the data starts over
    if batch:
        _refuse(f"after update {batch} of epoch {epoch + 1}", "epoch", "an epoch", changed)
    if any(_ends_inside_pass(facts, epoch) for facts in (saved, now)) or (
        _is_one_pass(feed) and epoch > feed.first_epoch
    ):
        where = f"at the end of epoch {epoch}, inside a pass over the data"
        _refuse(where, "pass", "a pass", changed)


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any], inside_epoch: bool) -> list[str]:
    return [
        f"{name}: {saved.get(name, 'not used')} then, {now.get(name, 'not used')} now"
        for name in dict.fromkeys([*saved, *now])
        if name != _EXHAUSTED
        and saved.get(name) != now.get(name)
        and not (name == _BATCHES and None in (saved.get(name), now.get(name)))
        and (inside_epoch or name != "trainer.accumulate")  # an epoch's end is between updates
    ]


def _ends_inside_pass(facts: Mapping[str, Any], epoch: int) -> bool:
    """Whether so many epochs end inside a pass, as `steps_per_epoch` lets them."""
    steps = facts.get("steps_per_epoch")
    if not steps:
        return False
    begun = epoch - facts.get("initial_epoch", 0)
    return place_in_passes(begun, 0, steps, facts.get(_BATCHES))[1] > 0


def _is_one_pass(feed: Feed) -> bool:
    """Whether all epochs are of one pass, as over an iterator, which cannot be begun again."""
    source = getattr(feed, "source", None)
    return source is not None and source.endless and not feed.infinite


def _refuse(where: str, rest: str, end: str, changed: list[str]) -> NoReturn:
    raise CheckpointError(
        f"the checkpoint stands {where}, and the rest of this {rest} would be other examples than "
        "then:\n  " + "\n  ".join(changed) + "\nSet them as they were; or resume from a "
        f"checkpoint at the end of {end} (checkpoint.resume=PATH), or start afresh "
        "(checkpoint.resume=never)."
    )
