"""Records the first updates of a `fit` for `ktrainer verify`: logs, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import Callback, writes_files
from ktrainer.data.local_batch import LocalBatch
from ktrainer.distributed.collectives import densified
from ktrainer.errors import ModelError
from ktrainer.steps import CompiledProgram
from ktrainer.steps.program_interface import LocalBatchLike
from ktrainer.steps.variable_placement import placement_of
from ktrainer.verify.batch_invariant_random import RandomDraws, batch_invariant_random
from ktrainer.verify.gradient_compare import precision_of
from ktrainer.verify.update_split import Split, split_of
from ktrainer.verify.verify_mode import RecordingDone, VerifyRun


class UpdateRecorder(Callback):
    """Begins with the weights of the unsplit run, and keeps what each update does.

    Args:
        verify_run: the one that this process belongs to.
    """

    def __init__(self, verify_run: VerifyRun) -> None:
        super().__init__()
        self.verify_run = verify_run
        self.arrays: dict[str, np.ndarray] = {}
        self._applied: dict[str, int] = {}
        self._before: int | None = None  # updates of the epochs before `initial_epoch`

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        metrics = {id(v) for v in self.model.metrics_variables}
        every = [v for v in self.model.variables if id(v) not in metrics]
        self._weights = [
            (f"{i:05}:{v.path}", v)
            for i, v in enumerate(every)
            if self._is_compared(v) and self._is_here(v)
        ]
        if self.verify_run.role == "unsplit":
            initial = {name: _array(v) for name, v in self._weights}
            initial |= {f"ulp/{name}": _ulp(v) for name, v in self._weights}
            _save(self.verify_run.initial, initial)
        else:
            self._begin_alike()

    def on_step_begin(self, step: int) -> None:
        self._before = step if self._before is None else self._before
        self._applied.clear()

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                dense = densified(gradient)
                dense = dense if dense.dtype == tf.float64 else tf.cast(dense, tf.float32)
                name = self._name(variable)
                tf.numpy_function(lambda value, name=name: self._keep(name, value), [dense], [])
        return gradients

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        step -= self._before or 0
        for name, value in logs.items():
            kind = "loss" if name == "loss" else "metric"
            self.arrays[f"{step:04}/{kind}/{name}"] = np.asarray(value, np.float64)
        for name, variable in self._weights:
            self.arrays[f"{step:04}/weight/{name}"] = _array(variable)
        if step >= self.verify_run.steps:
            raise self.end()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        raise self.end()

    def end(self) -> RecordingDone:
        """Write the record; return the exception that ends the script."""
        placement = placement_of(self.model)
        first = self.world.is_root if placement is None else placement.replica == 0
        if first:
            self.arrays["precision"] = np.array(precision_of(self.model))
            split = split_of(self.trainer.config, self.trainer.plan)
            self.arrays["parts"] = np.array(split.parts)
            self.arrays["statistics"] = np.array(_statistics(self.model, split))
            _save(self.verify_run.recorded(self.world.rank), self.arrays)
        return RecordingDone()

    def _is_compared(self, variable: Any) -> bool:
        """Whether it has numbers that both runs share: all but the states of random generators."""
        dtype = tf.as_dtype(variable.dtype)
        is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
        return is_number and "seed_generator_state" not in variable.name

    def _is_here(self, variable: Any) -> bool:
        placement = placement_of(self.model)
        return placement is None or placement.holds(variable)

    def _name(self, variable: Any) -> str:
        """Key by position and path, which both runs share."""
        places = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        return f"{places.get(id(variable), 99999):05}:{variable.path}"

    def _keep(self, name: str, value: np.ndarray) -> None:
        # A step may apply its optimizers several times.
        times = self._applied[name] = self._applied.get(name, 0) + 1
        step = self.progress.step + 1 - (self._before or 0)
        more = f" ({times})" if times > 1 else ""
        self.arrays[f"{step:04}/gradient/{name}{more}"] = np.array(value)

    def _begin_alike(self) -> None:
        with np.load(self.verify_run.initial, allow_pickle=False) as initial:
            for name, variable in self._weights:
                if name not in initial or initial[name].shape != tuple(variable.shape):
                    raise ModelError(
                        f"the weight {variable.path} of this run is not in the run in one process: "
                        "the script must make the same model whatever the backend is."
                    )
                variable.assign(initial[name])


class RecorderWithoutGradients(UpdateRecorder):
    """The same where steps run in other processes, as with parameter servers."""

    on_gradients = Callback.on_gradients


class UnsplitUpdates(CompiledProgram):
    """Updates of all their batches at once."""

    def train(self, shares: Sequence[LocalBatchLike]) -> Any:
        return super().train([_joined(shares)] if len(shares) > 1 else shares)


def recorded_callbacks(callbacks: Sequence[Any], verify_run: VerifyRun, remote: bool) -> list[Any]:
    """The callbacks of a run of `ktrainer verify`, which leaves no files.

    Args:
        callbacks: of the run as it is.
        verify_run: the one that this process belongs to.
        remote: whether steps run in other processes.
    """
    kept = [c for c in callbacks if not (writes_files(c) or getattr(c, "rank_zero_only", False))]
    return [*kept, RecorderWithoutGradients(verify_run) if remote else UpdateRecorder(verify_run)]


@contextmanager
def recorded_run(verify_run: VerifyRun | None) -> Iterator[None]:
    """Context in which steps are traced and run: every example draws the same random numbers."""
    if verify_run is None:
        yield
        return
    with batch_invariant_random(RandomDraws(alike=True)):
        yield


def _joined(shares: Sequence[LocalBatchLike]) -> LocalBatch:
    batch = tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else _concatenated(parts),
        *(share.batch for share in shares),
    )
    examples = sum(share.examples for share in shares)
    return LocalBatch(batch, examples, examples)


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(list(parts), 0)


def _statistics(model: keras.Model, split: Split) -> str:
    """By what layers use statistics of their part of a batch: "replica", "microbatch" or ""."""
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    if layers and split.in_turn > 1:
        return "microbatch"
    return "" if all(layer.synchronized for layer in layers) else "replica"


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def _array(variable: Any) -> np.ndarray:
    value = np.asarray(variable.numpy())
    known = value.dtype in (np.float32, np.float64) or value.dtype.kind in "iub"
    return value if known else value.astype(np.float32)


def _ulp(variable: Any) -> np.ndarray:
    """The rounding error of a number of size 1, in the type of a variable; 0 for integers."""
    dtype = tf.as_dtype(variable.dtype)
    return np.asarray(np.spacing(dtype.as_numpy_dtype(1)) if dtype.is_floating else 0, np.float64)
