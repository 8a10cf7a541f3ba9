"""Abstract source of batches, for tf.data, PyDatasets and generators."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from ktrainer.data.local_batch import leaf_names
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.distributed.world import World
from ktrainer.errors import CheckpointError

_LONGEST = 200  # bytes of a state's label


class Piece(NamedTuple):
    """A batch as a source yields it, whole or cut.

    Attributes:
        batch: this replica's slice of it (the first row, when that is empty), or all of it.
        rows: rows of the whole batch.
        digests: one number per leaf of the whole batch; empty if they are not compared.
        end: of a source that several calls read: how many of its items end with this one.
    """

    batch: Any
    rows: int
    digests: tuple[int, ...] = ()
    end: int = 0


class Source(ABC):
    """Batches of the user's data, epoch by epoch.

    Attributes:
        spec: nested specs of one batch, the batch dimension None; None if the source is empty.
        num_batches: batches an epoch, None when unknown.
        endless: each epoch continues where the one before stopped.
        infinite: never runs out.
        reopens: can be opened again from its beginning.
        indexed: an endless source that can be opened anywhere at no cost, once an epoch.
        checked: batches always fit `spec`.
        reorders: its order may change each time it is opened.
        unseeded: its order may be another one in each run, and no state restores it.
        reads_whole: passes are read to their end; a number of steps may cut them.
        shuffles: may draw an order each time it is opened.
        state_of_opening: `state` is of how the open epoch began: it fits each position in the
            epoch, and is the same on all ranks that run the same code.
        openings: iterators that `Model.fit` makes of it for each pass: two where it knows the
            length, but for passes that go over several epochs.
    """

    spec: Any = None
    num_batches: int | None = None
    endless: bool = False
    infinite: bool = False
    reopens: bool = True
    indexed: bool = False
    checked: bool = True
    reorders: bool = False
    unseeded: bool = False
    reads_whole: bool = True
    shuffles: bool = False
    state_of_opening: bool = False
    openings: int = 1

    @abstractmethod
    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        """The batches of an epoch, or of the endless stream, after the first `skip`."""

    def take(self, piece: Piece) -> bool:
        """Count a batch as used, not just read; return False if another call has used it."""
        return True

    def use(self, batches: int) -> None:  # noqa: B027 - most can be opened again
        """Count so many batches of an unread source as used, for the calls after this one."""

    def look(self) -> Piece | None:
        """The first batch, if it was read as the source was made; None if only `open` shows it."""
        return None

    def drop_peeked(self, pieces: Iterator[Piece]) -> None:
        """Close what `open` gave of epoch 0, of which only the first batch was looked at: the epoch
        is opened again, or skipped."""
        close_iterator(pieces)

    def replay_passes(self, passes: int, openings: int) -> None:  # noqa: B027 - most draw nothing
        """Repeat the draws of passes that were read before a resume, and of their openings."""

    def state(self) -> bytes | None:
        """The state of the open iterator, if it is more than the number of batches taken."""
        return None

    def state_between(self) -> bytes | None:
        """What the next epoch's order depends on, if it is more than its number."""
        return None

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        """Like `open`, in the order that was there when `state` or `state_between` returned this.

        Raises:
            CheckpointError: the state is of other data.
        """
        return self.open(epoch, skip)

    def shuffle(self, order: ShuffleOrder) -> bool:
        """Draw batches in this order from here on; return whether the source supports it."""
        return False

    @property
    def order(self) -> ShuffleOrder | None:
        """The order of batches, as it was drawn so far; None if they are not shuffled."""
        return None

    def slow_stage(self) -> str | None:
        """The stage that takes most: see `Feed.slow_stage`."""
        return None

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        """Keep the user's code from running in other threads: see `Feed.paused`."""
        yield None

    def close(self) -> None:  # noqa: B027 - most sources hold nothing that needs closing
        """Stop background work. May be called twice."""


def labelled(label: str, state: bytes) -> bytes:
    """`state` after a label, which names the data that it is of."""
    return label.encode() + b"\n" + state


def unlabelled(label: str, state: bytes, epoch: int, skip: int) -> bytes | None:
    """The state behind a label; None, with a warning, if this is the state of other data.

    Raises:
        CheckpointError: of other data, inside the epoch.
    """
    then, _, rest = state.partition(b"\n")
    if then == label.encode():
        return rest
    text = then.decode(errors="replace")
    known = len(then) < _LONGEST and text.isprintable()
    found = text if known else "other data, or of an older version"
    problem = f"the checkpoint keeps the order of {found}, but the data is {label} now"
    if not skip:
        warnings.warn(f"{problem}: epoch {epoch + 1} has the order of a new run", stacklevel=2)
        return None
    raise CheckpointError(
        f"{problem}, so that epoch {epoch + 1} cannot continue after batch {skip} with the "
        "remaining batches. Give the data as it was, or resume from a checkpoint at the end of an "
        "epoch (checkpoint.resume=PATH). checkpoint.iterators=false reads the data again up to "
        "there, in whatever order it is then."
    )


def close_iterator(iterator: Iterator[Any] | None) -> None:
    """Close a generator; other iterators have nothing to close."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def describe(spec: Any) -> str:
    """A spec as text: `x: float32[None, 4], y: int64[None]`."""
    if spec is None:
        return "nothing"
    leaves = zip(leaf_names(spec), tf.nest.flatten(spec), strict=True)
    return ", ".join(f"{name}: {_describe_leaf(leaf)}" for name, leaf in leaves)


def _describe_leaf(leaf: Any) -> str:
    if leaf is None:
        return "none"
    kind = "" if isinstance(leaf, tf.TensorSpec) else type(leaf).__name__.removesuffix("Spec") + " "
    shape = leaf.shape
    return f"{kind}{leaf.dtype.name}{'[?]' if shape.rank is None else shape.as_list()}"


def slicing(world: World, sliced: bool) -> tuple[int, int]:
    """The slice of each batch that this process takes, and the number of slices."""
    return (world.replica, world.replicas) if sliced else (0, 1)


def compared(world: World, sliced: bool) -> bool:
    """Return whether pieces need digests: other ranks must make the same batches, all ranks if each
    takes its slice, else those of this replica."""
    return world.size > 1 if sliced else world.replicas < world.size
