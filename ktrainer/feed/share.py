"""One rank's part of a batch, and the feed that hands such parts out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank trains on in one step; the ranks of one replica train on the same.

    Attributes:
        batch: nested structure, `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, of tensors or
            NumPy arrays: this rank's rows. Never empty: a rank without rows gets one stand-in row.
        examples: true rows of this rank; 0 when `batch` is a stand-in.
        global_examples: rows of the whole global batch, summed over all replicas.
    """

    batch: Any
    examples: int
    global_examples: int

    @property
    def blank(self) -> bool:
        """Whether `batch` is only a stand-in, to be weighted with zero."""
        return self.examples == 0


class Feed(ABC):
    """The user's data as this rank's shares of the global batches.

    Attributes:
        num_batches: global batches an epoch, after `limit`; None when unknown. The same on all
            ranks.
        source_batches: the same before `limit`, of batches that the data brings with it.
        spec: nested `tf.TensorSpec` of a share, the batch dimension None. The same on all ranks.
            It can become wider during an epoch (a sequence of a new length, say): compare it by
            identity before each step, all ranks see it change at the same step.
        exhausted: a one-shot source has nothing more to give, in this or any later epoch.
    """

    num_batches: int | None = None
    source_batches: int | None = None
    spec: Any = None
    exhausted: bool = False

    @property
    def uniform(self) -> bool:
        """Whether every dimension but the batch dimension is known."""
        return all(_static(leaf) for leaf in tf.nest.flatten(self.spec))

    @abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Share]:
        """This rank's shares of one epoch.

        Close the iterator (or exhaust it) before asking for the next one.

        Args:
            epoch: 0-based; arrays are shuffled by it, endless streams go on from where they were.
            skip: global batches of that epoch already consumed, as after a restore.
        """

    @abstractmethod
    def peek(self, rows: int) -> Any:
        """Some examples of this rank's, as a batch, which are read in their turn all the same;
        None if there are none. Call it on all ranks together, and before the first epoch.

        Args:
            rows: how many are enough; there may be more.
        """

    def state(self, inside_epoch: bool) -> bytes | None:
        """Where this rank's batches stand, if that says more than how many were taken: with what
        the shuffles of a tf.data pipeline hold.

        Args:
            inside_epoch: whether an epoch is under way.
        """
        return None

    def go_on_from(self, state: bytes) -> None:  # noqa: B027 - most feeds need no more than `skip`
        """Let the next epoch, if it begins where `state` was told, begin with that state."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Facts about the data that must be the same on every rank, by name."""

    def close(self) -> None:  # noqa: B027 - most feeds hold nothing that needs closing
        """Stop background work. May be called twice."""


def bounds(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row, and the one after the last, of `rank`'s contiguous slice of `rows` rows.

    The slices of all ranks, in the order of ranks, are the whole batch. They differ by one row at
    most; earlier ranks have the longer ones.
    """
    base, extra = divmod(rows, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def leaf_names(structure: Any) -> list[str]:
    """A name such as `x`, `x/0` or `y/label` for each leaf, in the order of `tf.nest.flatten`."""
    top = ("x", "y", "sample_weight")
    if isinstance(structure, (tuple, list)) and len(structure) <= len(top):
        parts = list(zip(top, structure, strict=False))
    else:
        parts = [("x", structure)]
    return [name for prefix, part in parts for name in _names(prefix, part)]


def _names(prefix: str, part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for key in sorted(part):
            yield from _names(f"{prefix}/{key}", part[key])
    elif isinstance(part, (tuple, list)):
        for i, item in enumerate(part):
            yield from _names(f"{prefix}/{i}", item)
    else:
        yield prefix


def _static(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec):
        return spec is None
    return spec.shape.rank is not None and all(dim is not None for dim in spec.shape[1:])


def limited(num_batches: int | None, limit: int | float | None) -> int | None:
    """Batches an epoch under `limit`: a number of batches, or a fraction of a known length.

    Raises:
        DataError: a fraction of an unknown length.
    """
    from ktrainer.errors import DataError

    if limit is None:
        return num_batches
    if isinstance(limit, float):
        if num_batches is None:
            raise DataError(
                f"a limit of {limit:g} of all batches needs data whose length is known; "
                "give a whole number of batches instead"
            )
        return min(num_batches, max(1, int(num_batches * limit))) if limit > 0 else 0
    return int(limit) if num_batches is None else min(num_batches, int(limit))
