"""Seconds that each stage of an input pipeline takes, to name the slowest one."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import model_pb2

_MAPS = ("Map", "MapAndBatch", "ParallelMap")  # with a number of a version, sometimes


class StageTimes:
    """Seconds by stage, of a source made by Python; two clock readings each time.

    Attributes:
        batches: how many were made.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self.batches = 0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage's."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - begin

    def items(self, iterator: Iterator[Any], stage: str) -> Iterator[Any]:
        """The items, the time to make each added to a stage's."""
        end = object()
        while True:
            with self.timed(stage):
                item = next(iterator, end)
            if item is end:
                return
            self.batches += 1
            yield item

    def slowest(self) -> str | None:
        """The stage that takes most, and its time for a batch; None before the first one."""
        if not self.batches:
            return None
        stage = max(self._seconds, key=self._seconds.__getitem__)
        return said(stage, self._seconds[stage] / self.batches)


def said(stage: str, seconds: float) -> str:
    return f"{stage}, {seconds * 1e3:.3g} ms a batch"


def slowest_in_pipeline(dataset: tf.data.Dataset, iterator: Any) -> str | None:
    """The stage of an open tf.data pipeline that takes most, by TensorFlow's own model of it, which
    autotuning uses; None where there is none.

    Args:
        dataset: the pipeline, for the names of mapped functions.
        iterator: its resource.
    """
    try:
        text = tf.raw_ops.IteratorGetModelProto(iterator=iterator).numpy()
    except tf.errors.OpError:
        return None
    nodes = model_pb2.ModelProto.FromString(text).nodes
    batches = max((node.num_elements for node in nodes.values() if node.name == "Root"), default=0)
    if not batches:
        return None
    functions = _functions(dataset)
    found: list[tuple[float, str]] = []
    maps = [i for i, node in sorted(nodes.items()) if node.name.rstrip("V0123456789") in _MAPS]
    names = dict(zip(maps, functions, strict=True)) if len(maps) == len(functions) else {}
    for number, node in nodes.items():
        threads = max((p.value for p in node.parameters if p.name == "parallelism"), default=1)
        name = f"tf.data's {node.name}" + (f" of {names[number]}" if number in names else "")
        found.append((node.processing_time / 1e9 / batches / max(1, threads), name))
    seconds, name = max(found)
    return said(name, seconds)


def _functions(dataset: tf.data.Dataset) -> list[str]:
    """Names of the functions that are mapped, the last first."""
    graphs = [tf.compat.as_str(wrapped.function.name) for wrapped in dataset._functions()]
    found = [re.search(r"Dataset_map_(.+)_\d+$", name) for name in graphs]
    own = [match[1] for match in found if match is not None]
    return own + [name for each in dataset._inputs() for name in _functions(each)]
