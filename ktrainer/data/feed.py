"""Abstract feed: the user's data as this rank's local batches."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ktrainer.data.batch_source import close_iterator
from ktrainer.data.local_batch import LocalBatch
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.errors import DataError


class Feed(ABC):
    """The user's data as this rank's local batches.

    Attributes:
        num_batches: global batches an epoch, after `limit`; None when unknown. The same on all
            ranks.
        pass_batches: the same of one pass over the data.
        source_batches: the same before `limit`, for data that has a length.
        spec: nested `tf.TensorSpec` of a local batch, the batch dimension None. The same on all
            ranks. It can become wider during an epoch (a sequence of a new length, say): compare
            it by identity before each step, all ranks see it change at the same step.
        exhausted: a one-shot source has no more batches, in this or any later epoch.
        infinite: never runs out.
        batches_per_epoch: after so many the next epoch continues with the next batch; None for
            epochs that are passes over the data, or parts of them.
        first_epoch: number of the epoch with which the data begins.
    """

    num_batches: int | None = None
    pass_batches: int | None = None
    source_batches: int | None = None
    spec: Any = None
    exhausted: bool = False
    infinite: bool = False
    batches_per_epoch: int | None = None
    first_epoch: int = 0
    _live: Iterator[LocalBatch] | None = None  # a pass that the next epoch continues
    _position: tuple[int, int] = (0, 0)  # its number, and batches taken of it

    @property
    def uniform(self) -> bool:
        """True if every dimension but the batch dimension is known."""
        return all(_static(leaf) for leaf in tf.nest.flatten(self.spec))

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        """This rank's batches of one epoch.

        Close the iterator (or exhaust it) before asking for the next one.

        Args:
            epoch: 0-based; arrays are shuffled by it, endless streams continue where they were.
            skip: global batches of that epoch already consumed, as after a restore.
        """
        epoch -= self.first_epoch
        return (
            self.read(epoch, skip)
            if self.batches_per_epoch is None
            else self._continued(epoch, skip)
        )

    @abstractmethod
    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        """This rank's batches of one pass over the data; see `epoch`."""

    @property
    def shuffle_order(self) -> ShuffleOrder | None:
        """The order that examples or batches are shuffled in; None if they are not."""
        return None

    def set_shuffle_order(self, order: ShuffleOrder) -> None:  # noqa: B027 - some are not shuffled
        """Shuffle in this order from here on."""

    def continue_epochs(self, batches: int) -> None:
        """Let each epoch be so many batches and continue where the last one ended, as with
        `steps_per_epoch` in Keras. The last epoch of a pass is shorter if they do not divide."""
        self.batches_per_epoch, known = batches, self.source_batches
        self.num_batches = batches if known is None else min(batches, known)

    def is_complete(self, epoch: int, batches: int) -> bool:
        """Return whether so many batches are all of an epoch, as far as its length is known."""
        if self.num_batches is not None and batches >= self.num_batches:
            return True
        if self.batches_per_epoch is None or self.source_batches is None:
            return False
        return self._locate(epoch - self.first_epoch, batches)[1] >= self.source_batches

    def _continued(self, epoch: int, skip: int) -> Iterator[LocalBatch]:
        """The batches of an epoch; the next pass begins where one has ended."""
        assert self.batches_per_epoch is not None
        position = self._locate(epoch, skip)
        if self._live is None or position != self._position:
            self._begin(*position)
        for index in range(skip, self.batches_per_epoch):
            local_batch = next(self._live or iter(()), None)
            if local_batch is None:
                self.source_batches = self._position[1]  # now it is known
                if index or not self._position[1]:
                    return
                self._begin(self._position[0] + 1, 0)  # the epoch before had taken the last batch
                local_batch = next(self._live or iter(()), None)
                if local_batch is None:
                    return
            number, taken = self._position
            self._position = (number, taken + 1)
            yield local_batch
            if taken + 1 == self.source_batches:
                self._begin(number + 1, 0)
                return

    def _locate(self, epoch: int, skip: int) -> tuple[int, int]:
        """Number of the pass, and batches taken of it, at a position in an epoch."""
        assert self.batches_per_epoch is not None
        return place_in_passes(epoch, skip, self.batches_per_epoch, self.source_batches)

    def _begin(self, number: int, taken: int) -> None:
        self._drop()
        self._live, self._position = self.read(number, taken), (number, taken)

    def _drop(self) -> None:
        close_iterator(self._live)
        self._live = None

    def peek(self, rows: int) -> Any:
        """Some of this rank's examples as a batch, without consuming them; None if there are
        none. Call it on all ranks together, and before the first epoch.

        Args:
            rows: how many are enough; there may be more.
        """
        return None

    @property
    def state_is_common(self) -> bool:
        """Whether `state` is the same on all ranks, and fits any number of them."""
        return False

    def state(self, inside_epoch: bool) -> bytes | None:
        """The resume position of this rank, if it is more than the number of batches taken: with
        the contents of a tf.data pipeline's shuffle buffers.

        Args:
            inside_epoch: whether an epoch is under way.
        """
        return self.pass_state(inside_epoch or bool(self._live and self._position[1]))

    def pass_state(self, inside_pass: bool) -> bytes | None:
        """`state`, of a pass over the data."""
        return None

    def resume_from(self, state: bytes) -> None:  # noqa: B027 - most feeds need only `skip`
        """Let the next epoch start from `state`, if it starts at the position of `state`."""

    def repeat_first_epoch(self) -> None:  # noqa: B027 - rows in their order begin again
        """Let every epoch be the batches of the first one."""

    def replay_passes(self, passes: int) -> None:  # noqa: B027 - most feeds draw nothing
        """Continue as after so many passes over all data, which were made before a resume."""

    def read_up_to(self, epoch: int, skip: int) -> None:  # noqa: B027 - most can be read again
        """Leave data that can be read only once at a position, for the calls after this one, the
        first of which passes over what comes before."""

    def slow_stage(self) -> str | None:
        """The stage of this rank's input that takes most, and how long; None if it is unknown."""
        return None

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        """Keep the user's code from running in other threads inside the block; yields the reason
        if that is impossible.

        Args:
            timeout: seconds to wait for a batch that is being made.
        """
        yield None

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Properties of the data that must be the same on every rank, by name."""

    def close(self) -> None:
        """Stop background work. May be called twice."""
        self._drop()


def place_in_passes(
    epoch: int, skip: int, batches_per_epoch: int, pass_batches: int | None
) -> tuple[int, int]:
    """Number of the pass, and batches taken of it, at a position in epochs that continue.

    Args:
        epoch: counted from where the data begins.
        skip: batches taken of it.
        pass_batches: batches of a pass; None: still in the first one, else it would be known.
    """
    if pass_batches is None:
        return 0, epoch * batches_per_epoch + skip
    epochs = max(1, -(-pass_batches // batches_per_epoch))
    return epoch // epochs, epoch % epochs * batches_per_epoch + skip


def require_end(feed: Feed, remedy: str) -> None:
    """Refuse data that never runs out without a limit on the batches of an epoch.

    Raises:
        DataError: saying what to give.
    """
    if feed.infinite and feed.num_batches is None:
        raise DataError(
            "the data never ends, so neither would an epoch: say how many batches make one, with "
            + remedy
        )


def require_batches(feed: Feed, epoch: int) -> None:
    """Refuse an epoch that had no batches, unless data that can be read only once was read before.

    Raises:
        DataError: saying what to give.
    """
    if not (feed.exhausted and epoch > feed.first_epoch):
        raise DataError(
            "the training data has no batches: give more rows, or check data.batch_size and "
            "data.drop_remainder"
        )


def warn_of_short_epochs(feed: Feed, epoch: int, is_first: bool, wants_all: bool) -> None:
    """Warn after an epoch that had fewer batches than was asked for.

    Args:
        epoch: its number, counted from 0.
        is_first: whether training began with it.
        wants_all: whether data that has ended in it was asked for more.
    """
    wanted, found = feed.batches_per_epoch, feed.source_batches
    if feed.exhausted and feed.num_batches is not None and wants_all:
        warnings.warn(
            f"Your input ran out of data in epoch {epoch + 1}, before its {feed.num_batches} "
            "batches, so training ends. Give more data, or ask for fewer batches or epochs",
            stacklevel=3,
        )
    elif is_first and wanted and found is not None and found < wanted:
        warnings.warn(
            f"Your input ran out of data: it has {found} batches, fewer than steps_per_epoch="
            f"{wanted}, so each epoch has {found}. Let the data repeat itself, or leave "
            "steps_per_epoch out",
            stacklevel=3,
        )


def limited(num_batches: int | None, limit: int | float | None) -> int | None:
    """Batches an epoch under `limit`: a number of batches, or a fraction of a known length.

    Raises:
        DataError: a fraction of an unknown length.
    """
    if limit is None:
        return num_batches
    if isinstance(limit, float):
        if num_batches is None:
            raise DataError(
                f"a limit of {limit:g} of all batches needs data whose length is known; "
                "give a whole number of batches instead"
            )
        batches = min(num_batches, max(1, int(num_batches * limit))) if limit > 0 else 0
        return min(batches, keras.config.max_steps_per_epoch() or batches)
    return int(limit) if num_batches is None else min(num_batches, int(limit))


def _static(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec):
        return spec is None
    return spec.shape.rank is not None and all(dim is not None for dim in spec.shape[1:])
