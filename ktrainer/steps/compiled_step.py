"""A compiled function that is traced once, and called without TensorFlow's dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf


class CompiledStep:
    """`tf.function(step)`, traced when it is made.

    In every call `tf.function` compares the types of all arguments with those of its traces, and
    packs and unpacks them: 0.3 of the 0.7 ms that the step of a small model takes. Dense tensors of
    the specs' types and shapes skip that; all other arguments are dispatched by `tf.function`.

    Args:
        step: of tensors, in nested structures that are always those of `specs`.
        specs: of its arguments, their number of rows unknown; none: it is traced when it is called.
        xla: compile it with XLA.

    Attributes:
        specs: as they were given.
        trace: TensorFlow's concrete function of the specs; None without specs.
    """

    def __init__(self, step: Callable[..., Any], *specs: Any, xla: bool = False) -> None:
        self._function = tf.function(
            step, jit_compile=xla or None, reduce_retracing=True, autograph=False
        )
        self.specs, self._leaves = specs, tf.nest.flatten(specs)
        self._dense = bool(specs) and all(
            spec is None or isinstance(spec, tf.TensorSpec) for spec in self._leaves
        )
        self._scalar: tuple[float, tf.Tensor] | None = None
        self.trace: Any = self._function.get_concrete_function(*specs) if specs else None
        self._call = direct_call(self.trace)

    def __call__(self, *args: Any) -> Any:
        tensors = self._tensors(args) if self._dense else None
        if tensors is None or not tf.executing_eagerly() or tf.config.functions_run_eagerly():
            return self._function(*args)
        return self._call(*tensors)

    def _tensors(self, args: Any) -> list[tf.Tensor] | None:
        """The tensors among `args`, in order; None if they do not fit the trace."""
        tensors = [self._tensor(leaf) for leaf in tf.nest.flatten(args)]
        if len(tensors) != len(self._leaves) or not all(map(_fits, tensors, self._leaves)):
            return None
        return [tensor for tensor in tensors if tensor is not None]

    def _tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, np.float64):  # the weight of a local batch, mostly the same
            if self._scalar is None or self._scalar[0] != leaf:
                self._scalar = leaf, tf.constant(leaf)
            return self._scalar[1]
        if isinstance(leaf, np.ndarray):
            return tf.convert_to_tensor(leaf)
        return leaf


def graphs_of(functions: Iterable[Any]) -> list[Any]:
    """The graphs of those functions that are a `CompiledStep` and traced."""
    traces = [getattr(function, "trace", None) for function in functions]
    return [trace.graph for trace in traces if trace is not None]


def _fits(value: Any, spec: tf.TensorSpec | None) -> bool:
    if spec is None or value is None:
        return spec is None and value is None
    if not isinstance(value, tf.Tensor) or value.dtype is not spec.dtype:
        return False
    return bool(spec.shape.is_compatible_with(value.shape))


def direct_call(trace: Any) -> Callable[..., Any]:
    """A function that is traced, called with flat tensors as they are.

    Checking each of them against the signature takes longer than a small function does (0.4 ms for
    40 tensors). No gradient tape records it.
    """

    def call(*tensors: tf.Tensor) -> Any:
        return trace.inference_fn.call_preflattened([*tensors, *trace.captured_inputs])

    return call
