"""Learning rate, speed, memory and sent bytes in the rows of logs.

Events used: `on_train_begin`, `on_step_end` (start the clock after the first update), `on_log` (add
the values), `on_restore`.

Each runs on all ranks and logs the same values on each. Nothing is computed between two rows.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import keras
import psutil
import tensorflow as tf

from ktrainer.backends.pipeline.partition.flops import count_flops
from ktrainer.callbacks.base import Callback
from ktrainer.callbacks.learning_rate import plain_optimizers, rate_of_last_update
from ktrainer.errors import ConfigError
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.remote_variable import zeros_if_remote
from ktrainer.steps.sent_bytes import dense_variables, sent_bytes
from ktrainer.steps.step_context import single_process_step

_MIB = 2**20
_PASSES = 3  # forward, and backward with respect to the inputs and to the weights
_TRIAL_SECONDS = 0.02  # of matrix products, long enough for the clock
_LARGEST = 4096  # rows of a matrix: three take 200 MB in float32


class Watch(Callback, ABC):
    """Base class of callbacks that add values to a row of logs, for all callbacks after them."""

    def max_updates_per_call(self) -> int | None:
        return None  # `on_log` is called when `logging.every` is due

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        values = self.values()
        if isinstance(logs, dict):
            logs.update(values)

    @abstractmethod
    def values(self) -> dict[str, float]:
        """The values of now; called on all ranks together, and the same on each."""


class LearningRateWatch(Watch):
    """Log `learning_rate`: that of the update, of the first optimizer that makes any."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._optimizers = plain_optimizers(self.model)  # once: it walks all layers

    def values(self) -> dict[str, float]:
        for optimizer in self._optimizers:
            if optimizer._iterations.numpy():
                return {"learning_rate": rate_of_last_update(optimizer)}
        return {}


class SpeedWatch(Watch):
    """Log examples a second over all ranks, tokens a second, and the utilization of the devices.

    The time is that since the row before, or since the first update of this process, which compiles
    the step: validation and checkpoints in between count. Rank 0's clock decides.

    Args:
        speed: log `speed/examples_per_second`.
        tokens: tokens in an example; log `speed/tokens_per_second`. None: not.
        utilization: log `speed/utilization`: the operations of the model's forward pass times
            three, for the two products of the backward pass, over what the devices of all ranks
            can do, which a matrix product in the model's dtype measures at the start. Operations of
            the loss, of the optimizer and of recomputation do not count.

    Raises:
        ConfigError: the operations cannot be counted.
    """

    def __init__(
        self, speed: bool = True, tokens: int | None = None, utilization: bool = False
    ) -> None:
        super().__init__()
        self.speed, self.tokens, self.utilization = speed, tokens, utilization
        self._example_seconds = 0.0  # of one process's devices, at their speed
        self._mark: tuple[float, int] | None = None  # time, and examples by then

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._mark = None
        if self.utilization and not self.train_state.joining:
            spec = self.train_state.feed.spec
            peaks = self.world.allgather(_peak_of(self.model), "speed of all devices")
            devices = max(1, self.world.replicas // self.world.size)
            peak = sum(peaks) / len(peaks) * devices
            self._example_seconds = _PASSES * forward_flops(self.model, spec) / peak

    def max_updates_per_call(self) -> int | None:
        return None  # the clock starts after the first call

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._mark is None:
            self._mark = (time.perf_counter(), self.progress.examples)

    def on_restore(self, progress: Progress) -> None:
        self._mark = None

    def values(self) -> dict[str, float]:
        now = (time.perf_counter(), self.progress.examples)
        before, self._mark = self._mark or now, now
        seconds, examples = now[0] - before[0], now[1] - before[1]
        rate = examples / seconds if examples and seconds else None
        every = self.world.allgather((rate, self._example_seconds), "examples a second")
        rate = every[0][0]
        self._example_seconds = max(seconds for _, seconds in every)  # one that joined has none
        if rate is None:  # the first row, right after the first update
            return {}
        found = {"speed/examples_per_second": rate} if self.speed else {}
        if self.tokens is not None:
            found["speed/tokens_per_second"] = rate * self.tokens
        if self._example_seconds:
            found["speed/utilization"] = rate * self._example_seconds / self.world.size
        return found


class MemoryWatch(Watch):
    """Log `memory/process_mib` and `memory/process_peak_mib`: the resident memory of the process
    with the most; and `memory/gpu_mib` and `memory/gpu_peak_mib`, by TensorFlow's counters, of the
    GPU with the most."""

    def values(self) -> dict[str, float]:
        found = {
            "memory/process_mib": psutil.Process().memory_info().rss / _MIB,
            "memory/process_peak_mib": _peak_resident() / _MIB,
        }
        gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
        if gpus:
            infos = [tf.config.experimental.get_memory_info(name) for name in gpus]
            found["memory/gpu_mib"] = max(info["current"] for info in infos) / _MIB
            found["memory/gpu_peak_mib"] = max(info["peak"] for info in infos) / _MIB
        every = self.world.allgather(found, "memory of all processes")
        return {name: max(each.get(name, 0.0) for each in every) for name in every[0]}


class CommunicationWatch(Watch):
    """Log `communication/bytes_per_update`: what each rank sends of dense gradients, and receives,
    with an all-reduce that moves the least. Rows of embeddings, metrics and votes do not count.

    Args:
        wire, low_rank, sparse_as_dense: those of `backend`.
    """

    def __init__(
        self, wire: str = "none", low_rank: int | None = None, sparse_as_dense: bool = False
    ) -> None:
        super().__init__()
        self.wire, self.low_rank, self.sparse_as_dense = wire, low_rank, sparse_as_dense

    def values(self) -> dict[str, float]:
        local = local_variables(self.model)
        summed = [v for v in self.model.trainable_variables if id(v) not in local]
        dense = dense_variables(self.model, summed, self.sparse_as_dense)
        count = sent_bytes(dense, self.world.size, self.wire, self.low_rank)
        return {"communication/bytes_per_update": float(count)}


def forward_flops(model: Any, spec: Any) -> int:
    """Operations of a model's forward pass for one example; `partition/flops.py` says what counts.

    Args:
        spec: of a batch.

    Raises:
        ConfigError: they depend on the batch, or no formula knows them.
    """
    inputs = keras.utils.unpack_x_y_sample_weight(spec)[0]
    if not all(_is_static(leaf) for leaf in tf.nest.flatten(inputs)):
        raise ConfigError(
            "the operations of the model depend on the batch, as an input has no fixed shape. Pad "
            "all inputs to one shape, or set watch.utilization=false.",
            path="watch.utilization",
            value=True,
        )
    one = tf.nest.map_structure(lambda s: tf.TensorSpec([1, *s.shape[1:]], s.dtype), inputs)
    with single_process_step(), zeros_if_remote():
        forward = tf.function(lambda x: model(x, training=True), autograph=False)
        flops = count_flops(forward.get_concrete_function(one).graph)
    if not flops:
        raise ConfigError(
            "the operations of the model cannot be counted. Set watch.utilization=false.",
            path="watch.utilization",
            value=True,
        )
    return flops


def _is_static(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return False
    return all(length is not None for length in spec.shape[1:])


def _peak_of(model: Any) -> float:
    """Operations a second of this process's device: those of the fastest of a few tries of products
    of two square matrices in the dtype that the model computes in, as many and as large as take
    20 ms."""
    dtype = tf.as_dtype(model.dtype_policy.compute_dtype)
    size, count, best = 256, 1, 0.0
    while True:
        matrix = tf.cast(tf.fill([size, size], 1 / size), dtype)  # its powers are itself
        seconds = min(_seconds_of_products(matrix, count) for _ in range(4))
        best = max(best, 2.0 * count * size**3 / seconds)
        if seconds > _TRIAL_SECONDS:
            return best
        if size < _LARGEST:
            size *= 2
        else:
            count *= 2


def _seconds_of_products(matrix: tf.Tensor, count: int) -> float:
    start, product = time.perf_counter(), matrix
    for _ in range(count):
        product = tf.linalg.matmul(matrix, product)
    product[0, 0].numpy()  # which waits for it
    return math.nextafter(time.perf_counter() - start, math.inf)


def _peak_resident() -> float:
    """Bytes of the largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
