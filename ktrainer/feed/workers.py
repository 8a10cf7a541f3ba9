"""The items of a PyDataset, in order, made by the threads or processes that it asks for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import keras

_dataset: Any = None  # of this worker process


def ordered_items(dataset: keras.utils.PyDataset, indices: Iterator[int]) -> Iterator[Any]:
    """`dataset[i]` for each index, with the workers that the dataset was made with.

    Unlike Keras' own pool, a worker process that dies raises an error here, and does not hang.
    """
    workers, processes = dataset.workers, dataset.use_multiprocessing
    if workers <= 1 and not (processes and workers > 0):
        return _plain(dataset, indices)
    executor: Executor
    if processes:
        executor = ProcessPoolExecutor(workers, initializer=_start, initargs=(dataset,))
    else:
        executor = ThreadPoolExecutor(workers, "ktrainer-feed-worker")
    job: Any = _item if processes else dataset.__getitem__
    ahead = max(workers, dataset.max_queue_size)
    # Submitted here, in the caller's thread: a fork from a busy background thread is riskier.
    waiting = deque(executor.submit(job, i) for i in itertools.islice(indices, ahead))
    return _pooled(executor, job, indices, waiting)


def _plain(dataset: keras.utils.PyDataset, indices: Iterator[int]) -> Iterator[Any]:
    for index in indices:
        yield dataset[index]


def _pooled(
    executor: Executor, job: Any, indices: Iterator[int], waiting: deque[Future[Any]]
) -> Iterator[Any]:
    try:
        while waiting:
            item = waiting.popleft().result()
            for index in itertools.islice(indices, 1):
                waiting.append(executor.submit(job, index))
            yield item
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start(dataset: Any) -> None:
    global _dataset
    _dataset = dataset


def _item(index: int) -> Any:
    return _dataset[index]
