"""A gradient tape whose gradients are reduced over ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from ktrainer.dataparallel.gradients import make_reduction
from ktrainer.dataparallel.keras_hooks import hook_optimizers
from ktrainer.dataparallel.local_variables import variables_of_layers
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.state import opened
from ktrainer.errors import ModelError

_NOT_DIFFERENTIABLE = (
    "gradients of a DistributedGradientTape are differentiated, and have no gradients once ranks "
    "have reduced them. Take inner gradients, such as those of a penalty, by the plain tape: the "
    "outer tape reduces what follows from them. Or stop them with tf.stop_gradient."
)


class DistributedGradientTape(tf.GradientTape):
    """A tape that shares the state of another one, and reduces what `gradient` returns.

    ```python
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    ```

    Args:
        gradtape: the tape, before or after it has recorded; it may be persistent.
        device_dense, device_sparse: refused if given.
        compression: the type of gradients on the wire.
        sparse_as_dense: make IndexedSlices dense first; else the rows of all ranks are gathered.
        op: default: `ReduceOp.AVERAGE`.
        gradient_predivide_factor: with an average; gives the same numbers: gradients are divided
            by the number of ranks before they are summed.
        num_groups, groups: change nothing: gradients are fused by size.
        process_set: the ranks; default: all.
        scale_local_gradients: divide gradients of local sources by the number of ranks.
        bucket_cap_mb: largest fused buffer, in MiB; a multiple of 128 bytes.

    Raises:
        ConfigError: an argument cannot be.
        ModelError: `gradtape` is no tape.
    """

    __slots__ = ("_reduction",)

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Compression = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet | None = None,
        scale_local_gradients: bool = True,
        *,
        bucket_cap_mb: float = 25,
    ) -> None:
        """Share the state of a tape."""
        self._reduction = make_reduction(
            "all-reduce of a tape's gradients",
            compression=compression,
            op=op,
            sparse_as_dense=sparse_as_dense,
            bucket_cap_mb=bucket_cap_mb,
            process_set=process_set,
            device_dense=device_dense,
            device_sparse=device_sparse,
            gradient_predivide_factor=gradient_predivide_factor,
            scale_local_gradients=scale_local_gradients,
        )
        object.__setattr__(self, "__dict__", _state_of(gradtape))  # both are one tape

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable, or of a watched tensor, this rank's own.

        An optimizer that is to apply it together with reduced ones must not decide on all
        gradients at once: one with `global_clipnorm`, and a LossScaleOptimizer, raise a ModelError.

        Raises:
            ModelError: it is neither, or has no value yet.
        """
        self._reduction.local.add(source)
        state = opened()
        hook_optimizers(state.replaced, state.local)
        if not isinstance(source, tf.Tensor):  # a tensor is of one step
            state.local.add(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of `target`, reduced over ranks, in the structure of `sources`.

        A source without a gradient has None, on every rank alike. Another tape that differentiates
        what is returned raises a ModelError.
        """
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        # None is a leaf; IndexedSlices would be flattened further with `expand_composites`.
        gradients = tf.nest.flatten(found)
        reduced = self._reduction(gradients, flat)
        if record.could_possibly_record():
            reduced = [
                _refusing_second_order(*pair) for pair in zip(gradients, reduced, strict=True)
            ]
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Lists of (source, gradient): of local sources, and of those that were reduced."""
        found = self.gradient(target, sources, output_gradients)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True))
        local = self._reduction.local
        return [p for p in pairs if p[0] in local], [p for p in pairs if p[0] not in local]


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> DistributedGradientTape:
    """A DistributedGradientTape that leaves the gradients of some layers a rank's own.

    They are divided by the number of ranks, unless `scale_local_gradients=False`. Clip them apart
    from the others: a norm over both differs between ranks, and so an optimizer that has
    `global_clipnorm`, or scales the loss, refuses them.

    Args:
        gradtape: the tape.
        local_layers: a built Keras layer, or several; default: none.
        *args, **kwargs: as for `DistributedGradientTape`.

    Raises:
        ModelError: one of `local_layers` is no layer, or is not built.
    """
    local = variables_of_layers(local_layers)
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local:
        tape.register_local_source(variable)
    return tape


def _refusing_second_order(gradient: Any, reduced: Any) -> Any:
    """A reduced gradient, if it is dense, that says to a tape why it cannot be differentiated."""
    if reduced is gradient or not isinstance(reduced, tf.Tensor):
        return reduced

    @tf.custom_gradient
    def constant(_: tf.Tensor, value: tf.Tensor) -> Any:
        def refuse(*_: Any) -> Any:
            raise ModelError(_NOT_DIFFERENTIABLE)

        return tf.identity(value), refuse

    return constant(tf.convert_to_tensor(gradient), reduced)


def _state_of(tape: Any) -> dict[str, Any]:
    if not isinstance(tape, tf.GradientTape):
        raise ModelError(
            f"DistributedGradientTape wraps a tf.GradientTape, not {type(tape).__name__}."
        )
    return vars(tape)
