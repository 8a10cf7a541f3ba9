"""What ranks tell each other about their data before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import tensorflow as tf

from ktrainer.errors import DataError, DivergenceError, PeerLost
from ktrainer.feed.specs import widen
from ktrainer.world.base import World

HAS_BATCH, ENDED, FAILED = 1, 0, -1

T = TypeVar("T")


def exchange(world: World, values: list[int], what: str) -> np.ndarray:
    """The int64 `values` of every rank as an array `[size, len(values)]`, in one message."""
    table = np.zeros((world.size, len(values)), np.int64)
    table[world.rank] = values
    return world.oob_allreduce(table, "sum", what)


def together(world: World, make: Callable[[], T]) -> T:
    """`make()`, which runs a user's code; if it fails on one rank, no rank goes on without it.

    Raises:
        PeerLost: on the ranks on which `make` did not fail.
    """
    if world.size == 1:
        return make()
    failure, made = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    states = exchange(world, [FAILED if failure else HAS_BATCH], "open the data")
    if failure is not None:
        raise failure
    raise_failed(states[:, 0])
    return cast(T, made)


def raise_failed(states: np.ndarray) -> None:
    """Raise on the ranks that are well if another rank's input pipeline has failed."""
    failed = np.flatnonzero(states == FAILED)
    if failed.size:
        raise PeerLost(f"the input pipeline failed on {ranks(failed)}; its own error says why")


def raise_uneven(states: np.ndarray, batch: int) -> NoReturn:
    """Raise on every rank: some are out of data, others are not, where all see the same data."""
    raise DivergenceError(
        f"data: {ranks(np.flatnonzero(states == ENDED))} ran out of data after {batch} batches, "
        f"{ranks(np.flatnonzero(states == HAS_BATCH))} did not. With data.batch=global and "
        "data.shard=batch every rank must be given the same data. If each rank has data of its "
        "own, set data.batch=per_worker."
    )


def raise_other_rows(table: np.ndarray, names: list[str], where: str) -> None:
    """Raise on every rank if the columns of `table` (`rows`, then one per leaf) are not equal."""
    for column, name in enumerate(["number of rows", *names]):
        other = np.flatnonzero(table[:, column] != table[0, column])
        if other.size:
            raise DivergenceError(
                f"data: {where} differs in {name}: {ranks(other)} got other values than rank 0. "
                "With data.batch=global every rank must see the same batches in the same order. "
                "A shuffle needs a seed (`dataset.shuffle(n, seed=0)`), and a pipeline must be "
                "deterministic; if each rank has data of its own, set data.batch=per_worker."
            )


def agreed_spec(world: World, spec: Any) -> Any:
    """The narrowest spec that covers the `spec` of every rank; None where a rank has no data.

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


def same_spec(one: Any, two: Any) -> bool:
    """Whether two specs are equal, leaf by leaf."""
    return tf.nest.flatten(one) == tf.nest.flatten(two)


def ranks(numbers: np.ndarray) -> str:
    """`rank 1` or `ranks 1, 3`."""
    listed = ", ".join(str(int(number)) for number in numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"
