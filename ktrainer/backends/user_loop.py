"""A training loop of the user's own in one process; other backends derive theirs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import tensorflow as tf

from ktrainer.data.distributed_dataset import require_dataset
from ktrainer.data.local_batch import LocalBatch
from ktrainer.distributed.world import World
from ktrainer.errors import ConfigError
from ktrainer.steps.assertions import explain_assertions
from ktrainer.steps.loop_step import as_function

ReduceOp = Literal["sum", "mean"]


class UserLoop:
    """Distributes batches, runs steps and reduces results, for a loop of the user's own.

    Args:
        world: the ranks; its step counts the steps that are run.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._steps: dict[Callable[..., Any], Any] = {}
        self._scheduled: list[Any] = []

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        """The batches of `dataset`, in parts for `run`."""
        require_dataset(dataset)
        return dataset

    def rows(self, local: LocalBatch) -> Any:
        """A feed's local batch, as `run` takes it."""
        return local.rows()

    def heal_steps(self, variables: Sequence[Any] | None) -> None:
        """Prepare for lost ranks, of which there are none here."""

    def take_error(self) -> BaseException | None:
        """The error of a lost rank, because of which the last step did not count."""
        return None

    @tf.autograph.experimental.do_not_convert
    def run(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a step, compiled; return its result on each replica."""
        if tf.executing_eagerly():
            self.world.step += 1
        with self._explained():
            return self._compiled(step)(*args)

    @tf.autograph.experimental.do_not_convert
    def reduce(self, op: ReduceOp, value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas; means of integers are float64.

        Raises:
            ConfigError: something in it is no number.
        """

        def reduced(each: Any) -> tf.Tensor | None:
            if each is None:
                return None
            tensor = tf.convert_to_tensor(each)
            is_whole = wide_type(tensor) == tf.int64
            return tf.cast(tensor, tf.float64) if op == "mean" and is_whole else tensor

        return tf.nest.map_structure(reduced, value)

    def schedule(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run a step, whose result `join` returns."""
        self._scheduled.append(self.run(step, args))

    def join(self) -> list[Any]:
        """Wait for all scheduled steps; the sums of their results over replicas, in order."""
        results, self._scheduled = self._scheduled, []
        return self.reduce("sum", results)

    def _compiled(self, step: Callable[..., Any]) -> Any:
        if step not in self._steps:
            self._steps[step] = self._compile(step)
        return self._steps[step]

    def _compile(self, step: Callable[..., Any]) -> Any:
        return as_function(step)

    def _explained(self) -> AbstractContextManager[None]:
        """Context in which a step runs, and its errors are explained."""
        return explain_assertions()


def wide_type(tensor: tf.Tensor) -> tf.DType:
    """The type in which numbers of a tensor's type are added up.

    Raises:
        ConfigError: it has no numbers.
    """
    if tensor.dtype.is_floating:
        return tf.float64
    if tensor.dtype.is_integer:
        return tf.int64
    raise ConfigError(
        f"trainer.reduce sums numbers, not {tensor.dtype.name}; cast it first (`tf.cast`)"
    )
