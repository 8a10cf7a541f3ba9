"""Several updates in one compiled call, for `Program.train_many`: less Python between small steps.

A call of K updates gives the bits of K calls, so that it makes no difference how many a call makes.
TensorFlow's graph optimizer rewrites a step by the shapes that it knows: the loop's are as unknown
as those of the step that runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from ktrainer.state.nested_logs import flatten_paths, losses_of
from ktrainer.steps.compiled_step import CompiledStep
from ktrainer.steps.program_interface import LocalBatchLike
from ktrainer.steps.random_numbers import draws_by_count

_known: WeakKeyDictionary[CompiledStep, bool] = WeakKeyDictionary()  # whether it can be compiled


def stack_local_batches(
    local_batches: Sequence[LocalBatchLike],
    weigh: Callable[[LocalBatchLike], np.ndarray | np.float64],
) -> tuple[Any, np.ndarray] | None:
    """Batches stacked on a new first axis, and their weights; None if they do not stack.

    Local batches stack when all have dense leaves of the same shapes, and none is padding.

    Args:
        local_batches: one for each step.
        weigh: what a step is given beside its batch.
    """
    if any(each.examples == 0 for each in local_batches):
        return None
    flat = [keras.tree.flatten(each.batch) for each in local_batches]
    if not all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in flat[0] if leaf is not None):
        return None
    if len({tuple(map(_kind, leaves)) for leaves in flat}) != 1:
        return None
    try:
        stacked = [_stack(column) for column in zip(*flat, strict=True)]
    except tf.errors.InvalidArgumentError:  # tensors of other shapes
        return None
    batch = keras.tree.pack_sequence_as(local_batches[0].batch, stacked)
    return batch, np.array([weigh(each) for each in local_batches])


def _kind(leaf: Any) -> Any:
    """Leaves of which it differs do not stack. Of tensors it has no shape, which takes a while to
    ask for; those of other shapes cannot be packed."""
    if isinstance(leaf, np.ndarray):
        return np.ndarray, tf.as_dtype(leaf.dtype), leaf.shape
    return None if leaf is None else (type(leaf), leaf.dtype)


def _stack(leaves: Sequence[Any]) -> Any:
    if leaves[0] is None:
        return None
    # tf.stack makes int32 of arrays of int64, and looks into tensors for others.
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else tf.raw_ops.Pack(values=leaves)


class StepLoop:
    """A compiled loop of `step(batch, weight)` over stacked batches and weights.

    Args:
        step: one of which `can_loop(step, all_logs)` is true.
        ends_at_bad_loss: whether a step with a loss that is not finite is the last one.
        all_logs: whether the logs of all steps are wanted.
    """

    def __init__(self, step: CompiledStep, ends_at_bad_loss: bool, all_logs: bool) -> None:
        self._step, self._ends_at_bad_loss, self._all_logs = step, ends_at_bad_loss, all_logs
        self._logs = step.trace.structured_outputs
        self._specs = [spec for spec in tf.nest.flatten(self._logs) if spec is not None]
        stacked = keras.tree.map_structure(_stacked_spec, step.specs)
        self._compiled = CompiledStep(self._loop, *stacked)

    def __call__(self, *stacked: Any) -> list[Any]:
        """The logs of each step that was made; None for all but the last unless `all_logs`."""
        values, made = self._compiled(*stacked)
        # Their number in the arguments is known without a wait for the device.
        steps = int(made) if self._ends_at_bad_loss else len(stacked[-1])
        if not self._all_logs:
            return [*[None] * (steps - 1), self._pack(values)]
        columns = [tf.unstack(value, steps) for value in values]
        return [self._pack([column[i] for column in columns]) for i in range(steps)]

    def _loop(self, *stacked: Any) -> Any:
        count = tf.shape(stacked[-1])[0]

        def update(i: Any, _: Any, *kept: Any) -> Any:
            given = keras.tree.map_structure(lambda t: None if t is None else t[i], stacked)
            logs = self._step(*given)
            good = _is_finite(logs) if self._ends_at_bad_loss else tf.constant(True)
            values = [value for value in tf.nest.flatten(logs) if value is not None]
            if self._all_logs:
                values = [array.write(i, v) for array, v in zip(kept, values, strict=True)]
            return i + 1, good, *values

        kept, shapes = self._initial_logs(count)
        steps, _, *values = tf.while_loop(
            lambda i, good, *_: good & (i < count),
            update,
            (tf.constant(0), tf.constant(True), *kept),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), *shapes),
            parallel_iterations=1,  # updates follow one another
        )
        if self._all_logs:  # of a loop that ended early, the rest was not written
            values = [array.stack()[:steps] for array in values]
        return values, steps

    def _initial_logs(self, count: tf.Tensor) -> tuple[list[Any], list[tf.TensorShape]]:
        """The variables of the loop that hold logs, as it begins, and the shapes they may take."""
        if self._all_logs:
            arrays = [tf.TensorArray(s.dtype, count, element_shape=s.shape) for s in self._specs]
            return arrays, [tf.TensorShape(None)] * len(arrays)
        zeros = [tf.zeros([dim or 0 for dim in s.shape], s.dtype) for s in self._specs]
        return zeros, [s.shape for s in self._specs]

    def _pack(self, values: Sequence[Any]) -> Any:
        rest = iter(values)
        leaves = [None if spec is None else next(rest) for spec in tf.nest.flatten(self._logs)]
        return tf.nest.pack_sequence_as(self._logs, leaves)


def can_loop(step: Callable[..., Any], all_logs: bool = False) -> TypeGuard[CompiledStep]:
    """Whether `StepLoop(step)` works, with the bits of single calls: it is compiled, arguments
    and results are dense, and no operation is random and stateful, as `tf.random.normal` is. Those
    of Keras' layers are stateless. With `all_logs`, logs have the same shapes in all steps, too."""
    if not isinstance(step, CompiledStep) or step.trace is None:
        return False
    if step not in _known:
        _known[step] = _can_loop(step)
    return _known[step] and (not all_logs or _logs_stack(step))


def _can_loop(step: CompiledStep) -> bool:
    leaves = tf.nest.flatten((step.specs, step.trace.structured_outputs))
    return all(map(_is_dense, leaves)) and not draws_by_count(step.trace.graph)


def _logs_stack(step: CompiledStep) -> bool:
    leaves = tf.nest.flatten(step.trace.structured_outputs)
    return all(leaf is None or leaf.shape.is_fully_defined() for leaf in leaves)


def _is_dense(leaf: Any) -> bool:
    dense = isinstance(leaf, (tf.TensorSpec, tf.Tensor)) and leaf.shape.rank is not None
    return leaf is None or dense


def _is_finite(logs: Any) -> tf.Tensor:
    """As `losses_are_finite`, of tensors."""
    scalars = {p: v for p, v in flatten_paths(logs).items() if _is_number(v)}
    losses = [v for v in losses_of(scalars) if v.dtype.is_floating]
    return tf.reduce_all([tf.math.is_finite(v) for v in losses] or [True])


def _is_number(value: Any) -> bool:
    if not tf.is_tensor(value) or value.shape.rank != 0:
        return False
    return value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool


def _stacked_spec(spec: Any) -> Any:
    return None if spec is None else tf.TensorSpec([None, *spec.shape], spec.dtype)
