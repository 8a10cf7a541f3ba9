"""Changes to Keras around optimizers of reduced and local gradients: loss scales and XLA.

`model.compile` puts a LossScaleOptimizer around the optimizer of a float16 model, which checks the
gradients of one rank before the optimizer inside sees them: ranks would disagree on whether to
update. And on GPUs it lets XLA compile the step, in which nothing can be communicated. Both are
replaced once an optimizer is distributed, until `shutdown`; `apply` of all optimizers, once a tape
has local gradients, which not every optimizer can take.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer as KerasTrainer

from ktrainer.dataparallel.local_variables import LocalVariables, refuse_mixed
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import Replacements

_here = threading.local()


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or the one inside of it, reduces gradients over ranks."""
    return _distributed_apply(optimizer) is not None


def _distributed_apply(optimizer: Any) -> Any:
    while optimizer is not None:
        apply = vars(optimizer).get("apply")
        if hasattr(apply, "ktrainer_reduction"):
            return apply
        optimizer = vars(optimizer).get("inner_optimizer")
    return None


@contextmanager
def reducing() -> Iterator[bool]:
    """The application of an optimizer. Yields whether it is the outermost one in this thread."""
    first = not getattr(_here, "reduced", False)
    _here.reduced = True
    try:
        yield first
    finally:
        if first:
            _here.reduced = False


def hook_keras(replaced: Replacements) -> None:
    """Make Keras ask distributed optimizers first; once for each `init`."""
    scaled = keras.optimizers.LossScaleOptimizer
    if not hasattr(scaled.apply, "ktrainer_hook"):
        replaced.wrap(scaled, "apply", _outer_apply)
        replaced.wrap(KerasTrainer, "_resolve_auto_jit_compile", _no_xla)


def hook_optimizers(replaced: Replacements, local: LocalVariables) -> None:
    """Let Keras' optimizers refuse what they cannot do with local gradients of a tape; once for
    each `init`.

    Args:
        local: the sources whose gradients are local.
    """
    for owner in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        if not hasattr(owner.apply, "ktrainer_local"):
            replaced.wrap(owner, "apply", lambda original: _refusing_apply(original, local))


def _refusing_apply(original: Callable[..., Any], local: LocalVariables) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            variables = list(getattr(self, "inner_optimizer", self)._trainable_variables)
        else:
            variables = trainable_variables = list(trainable_variables)
        refuse_mixed(self, variables, local)
        return original(self, grads, trainable_variables)

    apply.ktrainer_local = True  # type: ignore[attr-defined]
    return apply


def _outer_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = _distributed_apply(self.inner_optimizer)
        if inner is None:
            return original(self, grads, trainable_variables)
        with reducing() as first:
            if first:
                reduction = _whole_reduction(inner)
                variables = list(trainable_variables or self.inner_optimizer._trainable_variables)
                refuse_mixed(self, variables, reduction.local)
                grads = reduction(list(grads), variables)
            return original(self, grads, trainable_variables)

    apply.ktrainer_hook = True  # type: ignore[attr-defined]
    return apply


def _whole_reduction(apply: Any) -> Any:
    """The reduction of an optimizer inside of a LossScaleOptimizer.

    Raises:
        ModelError: it adds up several passes, which the loss scale outside does not know of.
    """
    if apply.ktrainer_reduction is None:
        raise ModelError(
            "backward_passes_per_step is on the optimizer inside of a LossScaleOptimizer, whose "
            "scale may change between passes. Distribute the outer one: DistributedOptimizer("
            "keras.optimizers.LossScaleOptimizer(optimizer), backward_passes_per_step=...)."
        )
    return apply.ktrainer_reduction


def _no_xla(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve(self: Any) -> bool:
        return not is_distributed(getattr(self, "optimizer", None)) and original(self)

    return resolve
