"""Shuffles of a tf.data pipeline, and the seeds that they draw.

A shuffle draws a seed for each iterator that is made of it. Where it lies below another, that is
made when the first element is read, so that opening a pipeline draws fewer seeds than reading it.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf


def shuffles(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline shuffles."""
    return "Shuffle" in _kind(dataset) or any(map(shuffles, dataset._inputs()))


def shuffles_without_seed(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline shuffles in an order that is another one in each run."""
    unseeded = "Shuffle" in _kind(dataset) and not (int(dataset._seed) or int(dataset._seed2))
    return unseeded or any(map(shuffles_without_seed, dataset._inputs()))


def seeds_of_reading(
    dataset: tf.data.Dataset, whole: bool, opened: int = 1, read: int = 1, at_once: bool = True
) -> Iterator[tuple[tf.data.Dataset, int]]:
    """The shuffles of a pipeline, and how many seeds each draws while a pass over it is read, after
    those of the iterator that is opened for it. One that is made of a shuffle alone draws one.

    Args:
        whole: passes are read to their end: all of `repeat` and `concatenate`, and a cache is
            filled, below which nothing is read again. Else the first of each.
        opened, read: how many iterators of `dataset` a pass makes, and reads to their end.
        at_once: whether one is made as soon as the pass is opened.
    """
    inputs = list(dataset._inputs())
    if whole and "Cache" in _kind(dataset):
        return
    if whole and (count := _repeats(dataset)) > 0:
        # The last iterator is not read, and not even made where TensorFlow fuses both.
        fused = "Shuffle" in _kind(inputs[0])
        opened, read = read * (count + (not fused)) + opened - read, read * count
    if "Shuffle" in _kind(dataset):
        if opened > at_once:
            yield dataset, opened - at_once
        opened, at_once = read, False  # its input is opened by reading
    later = "Concatenate" in _kind(dataset)
    for number, each in enumerate(inputs[:1] if later and not whole else inputs):
        if later and number:
            yield from seeds_of_reading(each, whole, read, read, False)
        else:
            yield from seeds_of_reading(each, whole, opened, read, at_once)


def reads_in_part(dataset: tf.data.Dataset, whole: bool, cut: bool = False) -> bool:
    """Return whether it cannot be known how often a shuffle is read in a pass: below a `repeat`
    without end or, where passes are not read to their end, any, or below `concatenate`.

    Args:
        whole: passes are read to their end.
        cut: an operation above does not read its inputs to their end.
    """
    if whole and "Cache" in _kind(dataset):
        return False
    cut, repeats = cut or _cuts(dataset), _repeats(dataset)
    unclear = repeats < 0 and (whole or cut)
    if cut or not whole:
        unclear |= repeats > 1 or "Concatenate" in _kind(dataset)
    inputs = dataset._inputs()
    if unclear and any(_reshuffles(each, cached=not whole) for each in inputs):
        return True
    return any(reads_in_part(each, whole, cut) for each in inputs)


def _cuts(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline is known not to read its input to its end."""
    if _kind(dataset) != "_TakeDataset":
        return False
    count, (taken,) = int(dataset._count), dataset._inputs()
    elements = int(taken.cardinality())
    return count >= 0 and (elements == tf.data.INFINITE_CARDINALITY or count < elements)


def reshuffling(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The shuffles of a pipeline that draw another order for each iterator."""
    if "Shuffle" in _kind(dataset) and getattr(dataset, "_reshuffle_each_iteration", True):
        yield dataset
    for each in dataset._inputs():
        yield from reshuffling(each)


def draws_while_read(dataset: tf.data.Dataset) -> bool:
    """Return whether reading a pass to its end draws other seeds than reading its first element: a
    shuffle is below a `repeat`, `concatenate` or cache."""
    known = {id(each) for each in reshuffling(dataset)}
    whole, first = (
        [(each, count) for each, count in seeds_of_reading(dataset, part) if id(each) in known]
        for part in (True, False)
    )
    return whole != first or caches_a_shuffle(dataset)


def caches_a_shuffle(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline caches one of the orders of a shuffle: all passes have that."""
    inputs = dataset._inputs()
    found = any(map(_reshuffles, inputs)) if "Cache" in _kind(dataset) else False
    return found or any(map(caches_a_shuffle, inputs))


def _reshuffles(dataset: tf.data.Dataset, cached: bool = True) -> bool:
    """Return whether a pipeline shuffles in another order each time; below a cache, if `cached`."""
    if not cached and "Cache" in _kind(dataset):
        return False
    changes = "Shuffle" in _kind(dataset) and getattr(dataset, "_reshuffle_each_iteration", True)
    return bool(changes) or any(_reshuffles(each, cached) for each in dataset._inputs())


def _repeats(dataset: tf.data.Dataset) -> int:
    """How often a `repeat` reads its input; -1: without end, 0: it is no `repeat`."""
    return int(dataset._count) if "Repeat" in _kind(dataset) else 0


def _kind(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__
