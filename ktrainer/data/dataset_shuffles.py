"""Shuffles of a tf.data pipeline, and the seeds that they draw.

A shuffle draws a seed for each iterator that is made of it. Where it lies below another, that is
made when the first element is read, so that opening a pipeline draws fewer seeds than reading it.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf


def shuffles(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline shuffles."""
    return "Shuffle" in type(dataset).__name__ or any(map(shuffles, dataset._inputs()))


def seeds_of_reading(
    dataset: tf.data.Dataset, opened: int = 1, read: int = 1, at_once: bool = True
) -> Iterator[tuple[tf.data.Dataset, int]]:
    """The shuffles of a pipeline, and how many seeds each draws while a pass over it is read, after
    those of the iterator that is opened for it. One that is made of a shuffle alone draws one.

    Args:
        opened, read: how many iterators of `dataset` a pass makes, and reads to their end.
        at_once: whether one is made as soon as the pass is opened.
    """
    inputs, kind = dataset._inputs(), type(dataset).__name__
    if "Cache" in kind:  # read once
        return
    if "Repeat" in kind and (count := int(dataset._count)) > 0:
        # The last iterator is not read, and not even made where TensorFlow fuses both.
        fused = "Shuffle" in type(inputs[0]).__name__
        opened, read = read * (count + (not fused)) + opened - read, read * count
    if "Shuffle" in kind:
        if opened > at_once:
            yield dataset, opened - at_once
        opened, at_once = read, False  # its input is opened by reading
    for number, each in enumerate(inputs):
        later = number > 0 and "Concatenate" in kind
        yield from seeds_of_reading(each, read if later else opened, read, at_once and not later)


def caches_a_shuffle(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline caches what a shuffle has ordered: all passes have that order."""
    inputs = dataset._inputs()
    if "Cache" in type(dataset).__name__:
        return any(map(shuffles, inputs))
    return any(map(caches_a_shuffle, inputs))
