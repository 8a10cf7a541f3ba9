"""Agreement between ranks about their data, before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from ktrainer.data.batch_specs import widen
from ktrainer.distributed.world import World
from ktrainer.errors import DataError, DivergenceError, PeerLost

HAS_BATCH, ENDED, FAILED = 1, 0, -1
KINDS = (
    "arrays",
    "tf.data.Dataset",
    "PyDataset",
    "generator",
    "torch DataLoader",
    "random access",
)

RANDOM_AUGMENTATION = (
    "If only random augmentation in maps of tf.data differs, which is harmless, "
    "health.check_data=false turns the comparison off."
)

T = TypeVar("T")


def exchange(world: World, values: list[int], what: str) -> np.ndarray:
    """The int64 `values` of every rank as an array `[size, len(values)]`, in one message."""
    table = np.zeros((world.size, len(values)), np.int64)
    table[world.rank] = values
    return world.oob_allreduce(table, "sum", what)


def call_on_all_ranks(
    world: World, make: Callable[[], T], kind: Callable[[T], str] | None = None
) -> T:
    """`make()`, which runs a user's code; if it fails on one rank, all ranks raise.

    Args:
        world: the ranks.
        make: may fail.
        kind: the one of KINDS that was made; the same on every rank.

    Raises:
        PeerLost: on the ranks on which `make` did not fail.
        DivergenceError: on every rank, if they made different kinds.
    """
    if world.size == 1:
        return make()
    failure, made = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    made_kind = KINDS.index(kind(cast(T, made))) if kind and failure is None else 0
    states = exchange(world, [FAILED if failure else HAS_BATCH, made_kind], "open the data")
    if failure is not None:
        raise failure
    raise_failed(states[:, 0])
    raise_other_kinds(states[:, 1])
    return cast(T, made)


def raise_other_kinds(kinds: np.ndarray) -> None:
    """Raise on every rank if they were given different kinds of data, whose later messages would
    not match."""
    if (kinds == kinds[0]).all():
        return
    given = [f"{ranks(np.flatnonzero(kinds == k))}: {KINDS[k]}" for k in dict.fromkeys(kinds)]
    raise DivergenceError(
        f"data: ranks were given different kinds of it: {'; '.join(given)}. Give every rank the "
        "same kind, also where each has data of its own."
    )


def raise_failed(states: np.ndarray) -> None:
    """Raise on the other ranks if a rank's input pipeline has failed."""
    failed = np.flatnonzero(states == FAILED)
    if failed.size:
        raise PeerLost(f"the input pipeline failed on {ranks(failed)}; its own error says why")


def raise_uneven(world: World, states: np.ndarray, batch: int) -> NoReturn:
    """Raise on every rank: some are out of data, others are not, where all see the same data."""
    raise DivergenceError(
        f"data: {ranks(np.flatnonzero(states == ENDED))} ran out of data after {batch} batches, "
        f"{ranks(np.flatnonzero(states == HAS_BATCH))} did not. {_requirement(world)}"
    )


def raise_other_rows(world: World, table: np.ndarray, names: list[str], where: str) -> None:
    """Raise on every rank if the columns of `table` (`rows`, then one per leaf) are not equal."""
    for column, name in enumerate(["number of rows", *names]):
        other = np.flatnonzero(table[:, column] != table[0, column])
        if other.size:
            raise DivergenceError(
                f"data: {where} differs in {name}: {ranks(other)} got other values than rank 0. "
                f"{_requirement(world)} A shuffle needs a seed "
                "(`dataset.shuffle(n, seed=0)`), a generator that draws random numbers needs a "
                "random generator of its own (`np.random.default_rng(0)`, not `np.random`), and a "
                f"pipeline must be deterministic. {RANDOM_AUGMENTATION}"
            )


def raise_other_replica(table: np.ndarray, replica_of: np.ndarray, names: list[str]) -> None:
    """Raise on every rank if rows of `table` differ within a replica.

    Args:
        table: a row by rank: the state, the number of rows, then a digest per leaf.
        replica_of: the replica of each rank.
        names: of the leaves.
    """
    firsts = first_ranks(replica_of)
    for column, name in enumerate(["having a batch", "number of rows", *names]):
        expected = table[firsts, column][np.searchsorted(replica_of[firsts], replica_of)]
        other = np.flatnonzero(table[:, column] != expected)
        if other.size:
            replica = int(replica_of[other[0]])
            raise DivergenceError(
                f"data: the next batch of replica {replica} differs in {name}: {ranks(other)} got "
                f"other values than rank {firsts[replica]}, with which it holds one copy of the "
                "model. Such ranks must be given the same batches: shard and seed the data by "
                "`ktrainer.distributed.current_world().replica`, not by the rank."
            )


def first_ranks(replica_of: np.ndarray) -> np.ndarray:
    """The lowest rank of each replica: each replica's rows count once."""
    return np.unique(replica_of, return_index=True)[1]


def _requirement(world: World) -> str:
    if world.replicas == 1:
        return (
            "All ranks hold one copy of the model together, so all must be given the same batches "
            "in the same order."
        )
    return (
        "With data.batch=global and data.shard=batch every rank must see the same batches in the "
        "same order. If each rank has data of its own, set data.batch=per_worker."
    )


def agreed_spec(world: World, spec: Any) -> Any:
    """The narrowest spec that covers the `spec` of every rank; a rank without data passes None.

    Raises:
        DataError: on every rank, if structures or dtypes differ, or no rank has data.
    """
    if world.size == 1:
        return _needed(spec)
    merged = None
    for other in world.allgather(spec, "agree on the data's shapes"):
        if other is not None:
            merged = other if merged is None else widen(merged, other)
    return _needed(merged)


def _needed(spec: Any) -> Any:
    if spec is None:
        raise DataError("the data is empty: no rank has a single batch")
    return spec


def ranks(numbers: np.ndarray) -> str:
    """`rank 1` or `ranks 1, 3`."""
    listed = ", ".join(str(int(number)) for number in numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"
