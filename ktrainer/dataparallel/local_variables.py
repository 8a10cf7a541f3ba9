"""Variables that stay a rank's own: their gradients are not reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.steps.local_layers import refuse_mixed_decisions


class LocalVariables:
    """A set of variables by identity; a Keras variable and its `tf.Variable` are the same.

    Args:
        scale: whether their gradients are divided by the number of ranks. Shared gradients are
            averages, so with the sum of the ranks' losses over the number of ranks as objective,
            this is the gradient of a variable on which one rank's loss alone depends.
    """

    def __init__(self, scale: bool = True) -> None:
        self.scale = scale
        self._references: set[Any] = set()

    def add(self, variable: Any) -> None:
        """Add a variable.

        Raises:
            ModelError: it is none, or has no value yet.
        """
        value = _value_of(variable)
        if not isinstance(value, tf.Variable | tf.Tensor):
            raise ModelError(
                f"a local variable must be a built Keras variable or a tf.Variable, not "
                f"{variable!r}. Build the layer first, then register its variables."
            )
        self._references.add(value.ref())

    def __bool__(self) -> bool:
        return bool(self._references)

    def __contains__(self, variable: Any) -> bool:
        value = _value_of(variable)
        return isinstance(value, tf.Variable | tf.Tensor) and value.ref() in self._references

    def scaled(self, gradient: Any, size: int | tf.Tensor) -> Any:
        """The gradient of a local variable on one of `size` ranks; None stays None."""
        if gradient is None or not self.scale or (isinstance(size, int) and size == 1):
            return gradient
        divisor = tf.cast(size, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / divisor
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / divisor


def variables_of_layers(local_layers: Any) -> list[Any]:
    """The trainable variables of one layer, of several, or of none (None).

    Raises:
        ModelError: one is no Keras layer, or has no variables yet.
    """
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise ModelError(
                f"local_layers holds {layer!r}, which is no keras.layers.Layer. Give the layers "
                "themselves; for single variables call register_local_source or register_local_var."
            )
        if not layer.built:
            raise ModelError(
                f"the local layer {layer.name!r} is not built, so its variables cannot be told "
                "from others and would be reduced. Build the model first: give it an Input, or "
                "call it on one batch."
            )
        if layer.variables and not layer.trainable_variables:
            raise ModelError(
                f"the local layer {layer.name!r} has no trainable variables: it is frozen. Set "
                "trainable=True before it is registered, and freeze it after that."
            )
    return [variable for layer in layers for variable in layer.trainable_variables]


def refuse_mixed(optimizer: Any, variables: Iterable[Any], local: LocalVariables) -> None:
    """Refuse an optimizer of local and shared variables that decides on all gradients at once.

    Args:
        variables: that it updates.

    Raises:
        ModelError: ranks would update shared variables differently.
    """
    if local and len({variable in local for variable in variables}) > 1:
        refuse_mixed_decisions(optimizer)


def _value_of(variable: Any) -> Any:
    return variable._value if isinstance(variable, keras.Variable) else variable
