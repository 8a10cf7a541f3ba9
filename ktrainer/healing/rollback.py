"""Variables as they were: what an interrupted step, or callback, has changed is undone."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ktrainer.checkpoint.state import variables_here
from ktrainer.steps.optimizers import optimizers_of


class Rollback:
    """Keeps the values of all variables of a model, its optimizers, metrics and seeds, as far as
    they are in this process.

    TensorFlow copies a variable's memory only when it is written while somebody else still holds
    it, so to keep values costs next to nothing, and memory only for those that change.

    Args:
        model: built, with its optimizers.
        several: whether one call may update weights more than once, or in parts. If not, weights
            and slots change in one piece at the end of a step, and are not kept during it.
    """

    def __init__(self, model: keras.Model, several: bool) -> None:
        named = [variable for _, variable in variables_here(model)]
        every = {id(v): v for v in [*named, *model.metrics_variables]}
        updated = set() if several else _updated(model)
        self._groups = {
            "always": [v for key, v in every.items() if key not in updated],
            "outside of steps": [v for key, v in every.items() if key in updated],
        }
        self._values: dict[str, list[tf.Tensor]] = {}
        self._read = {name: _reader(group) for name, group in self._groups.items()}

    def keep(self) -> None:
        """Remember all values of now."""
        self._values = {name: read() for name, read in self._read.items()}

    def step_begins(self) -> None:
        """Let go of what a step changes only when nothing can interrupt it any more."""
        self._values.pop("outside of steps", None)

    def undo(self) -> None:
        """Put back what is remembered."""
        for name, values in self._values.items():
            for variable, value in zip(self._groups[name], values, strict=True):
                variable.assign(value)


def _updated(model: keras.Model) -> set[int]:
    """Ids of the variables that optimizers write: weights and slots. Numbers such as the learning
    rate are left out: callbacks write them too."""
    found = set()
    for optimizer in optimizers_of(model):
        slots = [v for v in optimizer.variables if tuple(v.shape)]
        found |= {id(v) for v in [*getattr(optimizer, "_trainable_variables", []), *slots]}
    return found | {id(v) for v in model.trainable_variables}


def _reader(variables: list[Any]) -> Any:
    """A function of the variables' values, in one call."""
    inner = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    return tf.function(lambda: [tf.identity(v) for v in inner], autograph=False)
