"""A `tf.function` that a step calls, which may have been traced without `keras_patches`.

Replacement for a method of TensorFlow; see `steps.keras_patches`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.eager.polymorphic_function.function_type_utils import (
    canonicalize_function_inputs,
)

from ktrainer.steps.step_context import StepContext


def traced_with_the_step(context: StepContext, original: Callable[..., Any]) -> Any:
    """Run the Python function itself: its tensors belong to the step, as what `context` keeps must.

    Functions of TensorFlow's own, such as that of `tf.vectorized_map`, and of ours stay as they
    are.
    """

    def call(self: Any, *args: Any, **named: Any) -> Any:
        function, options = self.python_function, self._experimental_autograph_options
        if str(getattr(function, "__module__", "")).startswith(("tensorflow.", "ktrainer.")):
            return original(self, *args, **named)
        if _keeps_xla(context, self):
            context.compiled = self.name
            try:
                return original(self._clone(None), *args, **named)
            finally:
                context.compiled = ""
        if self.input_signature is not None:
            bound = canonicalize_function_inputs(
                args, named, self.function_type, self._default_values
            )
            args, named = bound.args, bound.kwargs
        if tf.executing_eagerly() or not self._autograph:
            return function(*args, **named)
        with ControlStatusCtx(Status.ENABLED, options):
            return py_func_from_autograph(function, options)(*args, **named)

    return call


def _keeps_xla(context: StepContext, function: Any) -> bool:
    """Return whether a function with `jit_compile=True` is traced by itself, to be compiled."""
    if not function._jit_compile or tf.config.functions_run_eagerly():
        return False
    if context.xla or context.compiled or context.record:
        return False  # all of the step is compiled, or it only counts
    why = "the step runs eagerly" if tf.executing_eagerly() else ""
    if not why and in_stateless_scope():
        why = "this backend keeps what a step assigns until the step ends"
    if why:
        warnings.warn(f"jit_compile=True of {function.name} has no effect: {why}", stacklevel=3)
    return not why
