"""tf.data pipelines as sources; a replica's slice is cut in the pipeline, off the critical path."""

from __future__ import annotations

import itertools
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

from ktrainer.data.batch_source import (
    Piece,
    Source,
    compared,
    slicing,
)
from ktrainer.data.batch_specs import any_rows
from ktrainer.data.data_digests import tensor_digest
from ktrainer.data.dataset_iterator import (
    elements,
    free,
    from_bytes,
    set_state,
    state_of,
    to_bytes,
)
from ktrainer.data.dataset_shuffles import (
    caches_a_shuffle,
    reads_in_part,
    seeds_of_reading,
    shuffles,
    shuffles_without_seed,
)
from ktrainer.data.derived_dataset import mapped
from ktrainer.data.local_batch import (
    count_rows,
    graph_slice,
    leaf_names,
    not_examples,
    rows_in_graph,
)
from ktrainer.data.prefetch_thread import Prefetcher, on_device
from ktrainer.data.stage_times import slowest_in_pipeline
from ktrainer.distributed.world import World
from ktrainer.errors import CheckpointError, DataError

_DRAWS = b"num_random_samples"  # a shuffle's key for the seeds drawn, in a state
_BETWEEN_PASSES = 0.2  # seconds that a state is waited for
_READ_AHEAD = 30.0  # seconds that a state waits for the batch that is being read
# The start of a state: how many batches the pipeline skips, and bytes of those read ahead.
_HEAD = struct.Struct("<qq")


class DatasetSource(Source):
    """The batches of a `tf.data.Dataset`.

    Args:
        dataset: of batches: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        world: this process's replica in it takes the slice.
        sliced: whether all ranks run the same pipeline and each replica takes its slice.
        class_weight: class -> weight, turned into sample weights as Keras does.
        prefetch: batches kept ready; 0 leaves that to the pipeline, as does one that calls Python
            where ranks compare their batches.
        device: where the next two batches are copied to by a thread; None: nowhere.
    """

    reorders = True

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        world: World,
        sliced: bool,
        class_weight: Mapping[int, float] | None = None,
        prefetch: int = 2,
        device: str | None = None,
    ) -> None:
        if class_weight is not None:
            dataset = dataset.map(make_class_weight_map_fn(class_weight), tf.data.AUTOTUNE)
        _require_batches(dataset.element_spec)
        self._dataset, self._prefetch = dataset, prefetch
        self._replica, self._replicas = slicing(world, sliced)
        self._cut = compared(world, sliced)
        # Read ahead, what Python draws from global generators would differ between ranks.
        self._in_turn = self._cut and calls_python(dataset)
        self._device = None if self._in_turn else device
        self.spec = tf.nest.map_structure(any_rows, dataset.element_spec)
        cardinality = int(dataset.cardinality())
        self.num_batches = cardinality if cardinality >= 0 else None
        self.openings = 1 if self.num_batches is None else 2
        self.endless = self.infinite = cardinality == tf.data.INFINITE_CARDINALITY
        self.checked = all(_rank_known(leaf) for leaf in tf.nest.flatten(self.spec))
        self.shuffles, self.unseeded = shuffles(dataset), shuffles_without_seed(dataset)
        self._seeds_drawn = 0  # passes that have drawn what reading draws
        self._next = 0  # the epoch that follows those that were read here, or replayed
        self._warns = world.is_root
        self._opened = self._opened_before = 0  # how often, and before this pass
        self._iterator: Any = None  # the last that was opened, and its values
        self._values: Iterator[Any] = iter(())
        self._whole: tf.data.Dataset | None = None  # the pipeline that skips none
        self._empty: tf.data.Dataset | None = None  # one without elements
        self._freeing: list[threading.Thread] = []  # threads that free iterators
        self._skipped = 0  # batches that its pipeline skips
        self._restored: deque[Any] = deque()  # elements that were read ahead of a state
        self._ahead: Prefetcher | None = None

    def open(self, epoch: int, skip: int) -> Iterator[Piece]:
        self._open_at_epoch(epoch, skip)
        return self._pieces(skip)

    def open_at(self, epoch: int, skip: int, state: bytes) -> Iterator[Piece]:
        # The pipeline must be the same for TensorFlow, up to how much it had skipped.
        skipped, length = _HEAD.unpack_from(state)
        ahead, state = state[_HEAD.size :][:length], state[_HEAD.size + length :]
        if not (epoch == 0 and self._opened and skipped == self._skipped):
            self._open_at_epoch(epoch, skipped)
        # Else it is open, by `peek`: opened once more, its shuffles would draw another seed, and so
        # would all later epochs.
        try:
            set_state(self._iterator, state)
            self._restored = deque(from_bytes(ahead, self._opened_pipeline.element_spec))
        except tf.errors.OpError as error:
            raise CheckpointError(
                "the tf.data pipeline is not the one that the checkpoint was made with, so that "
                f"epoch {epoch + 1} cannot continue after batch {skip} with the remaining batches "
                f"({error.message.splitlines()[0]}). checkpoint.iterators=false reads the "
                "pipeline again up to there, in whatever order its shuffles are then."
            ) from error
        if _DRAWS not in state:
            self._opened += 1  # see `state`
        return self._pieces(skip)

    def state(self) -> bytes | None:
        if self._iterator is None:
            return None
        unread = [] if self._ahead is None else self._ahead.pending(_READ_AHEAD)
        if unread is None:
            return None
        state = state_of(self._iterator)
        # Between two passes of an endless pipeline, its shuffle is missing for a moment.
        end = time.monotonic() + _BETWEEN_PASSES
        while state is not None and self._lacks_shuffle(state) and self.endless:
            if time.monotonic() > end:
                return None
            time.sleep(0.001)
            state = state_of(self._iterator)
        if state is None or self._lacks_shuffle(state):
            return None
        ahead = to_bytes([*unread, *self._restored])
        return _HEAD.pack(self._skipped, len(ahead)) + ahead + state

    def _lacks_shuffle(self, state: bytes) -> bool:
        # Setting a state draws a seed from a shuffle, like opening, which its state takes back.
        # Once all of an epoch is prefetched the state has no shuffle any more: setting it then
        # counts as opening, if two iterators an epoch leave room for it.
        return _DRAWS not in state and self.shuffles and self.openings == 1

    def slow_stage(self) -> str | None:
        if self._iterator is None:
            return None
        return slowest_in_pipeline(self._opened_pipeline, self._iterator)

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        # TensorFlow's threads cannot be paused; without Python they share no state with this one.
        called = calls_python(self._dataset)
        yield "its tf.data pipeline calls Python, in other threads meanwhile" if called else None

    def drop_peeked(self, pieces: Iterator[Piece]) -> None:
        super().drop_peeked(pieces)
        self._next = 0

    def _open_at_epoch(self, epoch: int, skip: int) -> None:
        self.replay_passes(epoch, self.openings * epoch)
        self._opened_before = self._opened
        self._opened += 1
        self._seeds_drawn += 1
        self._next = epoch + 1
        self._free()
        self._opened_pipeline = self._pipeline(skip)
        self._iterator, self._values = elements(self._opened_pipeline)
        self._skipped, self._ahead = skip, None
        self._restored = deque()

    def _free(self) -> None:
        """Free the open iterator in a thread, as that can take long."""
        resource, self._iterator, self._values = self._iterator, None, iter(())
        if resource is None:
            return
        if self._empty is None:
            self._empty = self._opened_pipeline.take(0)
        thread = threading.Thread(None, free, "ktrainer-free-iterator", (resource, self._empty))
        thread.start()
        self._freeing = [each for each in self._freeing if each.is_alive()] + [thread]

    def close(self) -> None:
        self._free()
        while self._freeing:
            self._freeing.pop().join()

    def replay_passes(self, passes: int, openings: int) -> None:
        whole, missed = self.reads_whole, passes > self._next
        if missed and self._warns and reads_in_part(self._dataset, whole):
            warnings.warn(
                "the order of this tf.data pipeline may differ from that of the run that is "
                "resumed: it shuffles below a repeat or concatenate that is read in part, by "
                "`take` or a number of steps. Shuffle after them",
                stacklevel=2,
            )
        if missed and whole and not self.endless and self._must_read_first_pass():
            self._read_first_pass()
        self._open_up_to(openings)
        if (passes_left := passes - self._seeds_drawn) > 0:
            self._seeds_drawn = passes
            for shuffled, times in seeds_of_reading(self._dataset, whole):
                for _ in range(times * passes_left):
                    iter(shuffled)
        self._next = max(self._next, passes)

    def _must_read_first_pass(self) -> bool:
        """Return whether its order is cached, as that of all passes, or a look at its first batch
        has drawn an unknown part of the seeds that reading it draws."""
        looked = self._opened > 0 and self._next == 0
        return caches_a_shuffle(self._dataset) or (looked and reads_in_part(self._dataset, False))

    def _read_first_pass(self) -> None:
        """Read the first pass, or the rest of it."""
        if not self._opened:
            self._opened = self._seeds_drawn = 1
            self._opened_pipeline = self._pipeline(0)
            self._iterator, self._values = elements(self._opened_pipeline)
        for _ in self._values:  # after what was looked at
            pass

    def _open_up_to(self, openings: int) -> None:
        """Open the pipeline as often as Keras does.

        Every iterator draws a seed from the pipeline's shuffles: the same epochs, and whatever
        reads the dataset afterwards, must see the same orders.
        """
        while self._opened < openings:
            iter(self._dataset)
            self._opened += 1

    def _pieces(self, taken: int) -> Iterator[Piece]:
        values = self._read()
        try:
            with closing(values):
                for piece in self._cut_pieces(values) if self._cut else self._whole_pieces(values):
                    taken += 1
                    yield piece
        finally:  # a reader that knows the number of batches does not ask for one more
            if taken == self.num_batches:
                self._open_up_to(self._opened_before + self.openings)

    def _read(self) -> Generator[Any, None, None]:
        """The elements of the open pipeline after those of its state, copied ahead."""
        restored, values = self._restored, self._values

        def elements_left() -> Iterator[Any]:
            while restored:
                yield restored.popleft()
            yield from itertools.chain(values)  # which is not closed with this generator

        if self._device is None:
            yield from elements_left()
            return
        copied = map(self._copied, elements_left())
        # A wait that ended within an update would leave a state without what was taken of it.
        with closing(Prefetcher(copied, 1, "device", checked=False)) as ahead:
            self._ahead = ahead
            yield from ahead

    def _copied(self, element: Any) -> Any:
        assert self._device is not None
        if not self._cut:
            return on_device(element, self._device)
        batch, facts = element
        return on_device(batch, self._device), facts

    def _pipeline(self, skip: int) -> tf.data.Dataset:
        """The pipeline after `skip` batches; one that skips none is made once.

        TensorFlow optimizes a dataset when it is opened first, which takes longer the more data it
        holds in memory.
        """
        if not skip and self._whole is not None:
            return self._whole
        dataset = self._after(self._dataset, skip)
        if self._cut:
            dataset = mapped(dataset, self._slice)
        if self._in_turn:
            options = tf.data.Options()
            options.experimental_optimization.inject_prefetch = False
            options.experimental_optimization.map_parallelization = False
            dataset = dataset.with_options(options)
        elif self._prefetch and (self._cut or "Prefetch" not in type(dataset).__name__):
            dataset = dataset.prefetch(self._prefetch)
        if not skip:
            self._whole = dataset
        return dataset

    def _after(self, dataset: tf.data.Dataset, skip: int) -> tf.data.Dataset:
        """A pipeline after `skip` batches that have rows: no others are counted as taken."""
        if not skip:
            return dataset
        if "Batch" not in type(dataset).__name__:  # which makes none without rows
            dataset = dataset.filter(_has_rows)
        return dataset.skip(skip)

    @tf.autograph.experimental.do_not_convert  # which takes 0.3 s
    def _slice(self, *parts: Any) -> tuple[Any, tf.Tensor]:
        """This replica's rows, and `[rows of each array, digest of each leaf]` of all of it."""
        # tf.data spreads tuples over the arguments, and nothing else.
        batch = parts if isinstance(self._dataset.element_spec, tuple) else parts[0]
        leaves = tf.nest.flatten(batch)
        rows = [rows_in_graph(leaf) for leaf in leaves if leaf is not None]
        facts = tf.stack([*rows, *(tensor_digest(leaf) for leaf in leaves)])
        if self._replicas == 1:  # batches are compared only
            return batch, facts
        return graph_slice(batch, rows[0], self._replica, self._replicas), facts

    def _cut_pieces(self, iterator: Iterator[Any]) -> Iterator[Piece]:
        for batch, facts in iterator:
            values, leaves = facts.numpy().tolist(), tf.nest.flatten(batch)
            counts, digests = values[: -len(leaves)], values[-len(leaves) :]
            if self._replicas > 1 and len(set(counts)) > 1:
                named_leaves = zip(leaf_names(batch), leaves, strict=True)
                names = [name for name, leaf in named_leaves if leaf is not None]
                named = dict(zip(names, counts, strict=True))
                raise not_examples(named, self._replica, self._replicas)
            if rows := counts[0] or max(counts):  # as `count_rows`
                yield Piece(batch, rows, tuple(digests))

    def _whole_pieces(self, iterator: Iterator[Any]) -> Iterator[Piece]:
        for batch in iterator:
            rows = count_rows(batch)
            if rows:
                yield Piece(batch, rows)


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline calls Python, as `from_generator` and `tf.py_function` do."""
    graphs = (f.function.graph.as_graph_def() for f in dataset._functions())
    return any(b"PyFunc" in graph.SerializeToString() for graph in graphs) or any(
        map(calls_python, dataset._inputs())
    )


@tf.autograph.experimental.do_not_convert
def _has_rows(*batch: Any) -> tf.Tensor:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    return tf.reduce_any([rows_in_graph(leaf) > 0 for leaf in leaves])


def _rank_known(spec: Any) -> bool:
    return spec is None or spec.shape.rank is not None


def _require_batches(spec: Any) -> None:
    leaves = tf.nest.flatten(spec)
    if isinstance(spec, tuple) and not 1 <= len(spec) <= 3:
        raise DataError(
            "a tf.data pipeline must yield x, (x,), (x, y) or (x, y, sample_weight), but yields "
            f"tuples of {len(spec)}; wrap several inputs in a dict or an inner tuple"
        )
    if any(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank == 0 for leaf in leaves):
        raise DataError(
            f"the tf.data pipeline yields single rows ({spec}), not batches; "
            "end it with `.batch(batch_size)`"
        )
