"""The interface of a backend's program: steps that take local batches and give logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import keras

from ktrainer.state.nested_logs import LogPath, losses_are_finite
from ktrainer.steps.metric_logs import LogSource

Logs = Any  # dict of scalars as tensors, or what a user's step returns


class LocalBatchLike(Protocol):
    """The part of `ktrainer.data.LocalBatch` that a program needs."""

    @property
    def batch(self) -> Any: ...
    @property
    def examples(self) -> int: ...
    @property
    def global_examples(self) -> int: ...


class Program(ABC):
    """The steps of one model on this rank.

    Attributes:
        model: a compiled Keras model.
        counts_metrics: whether metrics are counted, and outputs computed, in this process. Those
            of all such processes together are the model's.
        trainable: whether each weight, by its `id()`, was trainable at the first `fit`.
        shared_variables: how many variables the model had as all ranks got those of rank 0, since
            it was compiled.
    """

    model: keras.Model
    counts_metrics: bool = True
    trainable: Mapping[int, bool] = {}
    shared_variables: int = 0

    @abstractmethod
    def build(self, spec: Any, training: bool = True) -> None:
        """Create all variables, without running a step.

        Called again with a wider `spec` when a batch of a new shape appears, on all ranks at
        the same step.

        Args:
            spec: nested `tf.TensorSpec` of a local batch, the batch dimension None.
            training: build what `train` needs (optimizer slots too), else what `test` needs.
        """

    @abstractmethod
    def train(self, local_batches: Sequence[LocalBatchLike]) -> Logs:
        """One update of the weights from its local batches (one, unless gradients accumulate)."""

    def train_many(
        self,
        local_batches: Sequence[LocalBatchLike],
        ends_at_bad_loss: bool = False,
        all_logs: bool = False,
    ) -> list[Logs]:
        """One update per local batch; the logs of each that was made.

        Args:
            ends_at_bad_loss: whether the call ends with an update whose loss is not finite; a
                program whose ranks could end apart continues.
            all_logs: return the logs of all updates; if False, all but the last may be None.
        """
        logs: list[Logs] = []
        for local_batch in local_batches:
            logs.append(self.train([local_batch]))
            if ends_at_bad_loss and not losses_are_finite(logs[-1]):
                break
        return logs

    @property
    def can_train_many(self) -> bool:
        """Whether `train_many` is faster than calls of `train`, with the same bits, and ends at a
        loss that is not finite."""
        return False

    @property
    def graphs(self) -> list[Any]:
        """The graphs of the compiled functions of an update, as far as they are traced."""
        return []

    @abstractmethod
    def test(self, local_batch: LocalBatchLike) -> Logs:
        """Loss and metrics of one local batch, the weights left as they are."""

    @abstractmethod
    def predict(self, local_batch: LocalBatchLike) -> Any:
        """The model's outputs for the true examples of a local batch, as NumPy arrays; None in a
        process that computes no outputs."""

    def check_unchanged(self) -> None:  # noqa: B027 - most steps serve until the next compile
        """Refuse a model that has changed since these steps were made."""

    def sources(self, kind: Literal["train", "test"]) -> Mapping[LogPath, LogSource | None] | None:
        """How to compute logs that are not simply a metric's result under its own name, by path;
        see `steps.metric_logs`. None if all are."""
        return None

    def abandon(self) -> None:  # noqa: B027 - most steps keep nothing between calls
        """Forget what an interrupted update had added up, and the logs of earlier ones."""

    def finish(self) -> Logs | None:
        """Wait for steps that still run: the model's variables and metrics are then up to date.

        Returns:
            The logs of the last step, if they were not known when it was asked for.
        """
        return None

    def finalize_weights(self) -> None:
        """Training is over: an optimizer that keeps averages of the weights puts them in place."""
        # As Keras: optimizers of a user's own `train_step` do not own all trainable weights.
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.finalize_variable_values(self.model.trainable_weights)
