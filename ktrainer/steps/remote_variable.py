"""A variable without a value: under a pipeline, one that another stage holds.

Keras knows variables without a value, those that are not initialised yet: `_value` is None, and
whoever asks for the value gets what `_initializer` returns. Here that is a `RemoteVariable`, which
returns nothing but says where the variable is. Shape, dtype, name and `repr` stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from ktrainer.errors import ModelError

_traced: ContextVar[bool] = ContextVar("traced", default=False)


@contextmanager
def zeros_if_remote() -> Iterator[None]:
    """Let variables of other stages read as zeros meanwhile, for code that is traced: what it
    computes with them is computed again, from their values, by the stage that has them."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


class RemoteVariable:
    """The initializer of a variable whose value is in another process.

    Attributes:
        partition: the stage that holds it.
        name: what errors call it.
        fetched: its value for the moment, of the variable's shape and dtype: while it is set, the
            variable can be read, as saving the whole model does. It can never be assigned.
    """

    def __init__(self, partition: int, name: str) -> None:
        self.partition, self.name = partition, name
        self.fetched: np.ndarray | None = None

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        """The value that reading the variable gives.

        Raises:
            ModelError: the value is not in this process.
        """
        if self.fetched is not None:
            with tf.device("CPU"):  # the device has room for its own stage alone
                return tf.convert_to_tensor(self.fetched, dtype)
        # Only the shape is looked at, as of any variable without a value.
        if in_symbolic_scope() or _traced.get():
            return tf.zeros(shape, dtype or tf.float32)
        return self.refuse()

    def refuse(self, *_: Any) -> NoReturn:
        """Say where the variable is."""
        raise not_in_one_process(
            f"variable {self.name} is on stage {self.partition} of the pipeline"
        )


def not_in_one_process(what: str) -> ModelError:
    """The error that values of a model were asked for which other processes hold.

    Args:
        what: was asked for, and where it is.
    """
    error = ModelError(
        f"the model is cut into stages, each in a process of its own, and {what}, not in this "
        "process. Instead of model.evaluate, model.predict or a call of the model, use "
        "trainer.evaluate(model, data) or trainer.predict(model, data); instead of model.save or "
        "reading weights, trainer.save(NAME.keras), then keras.models.load_model where all of the "
        "model is needed; all processes make these calls together. In a script without a Trainer "
        "they may be evaluate, predict, save and save_weights of the model, or of one made of some "
        "of its layers, which has get_weights too. compute_loss and metrics see "
        "the model's outputs, and weights of no layer."
    )
    error._keras_call_info_injected = True  # type: ignore[attr-defined]  # blame no layer for it
    error.ag_pass_through = True  # type: ignore[attr-defined]  # nor let AutoGraph rewrite it
    return error


def make_remote(variable: Any, partition: int) -> None:
    """Leave `variable`, a `keras.Variable`, without a value: stage `partition` holds it.

    A value that it has is let go. One that it does not have yet will not be made.
    """
    away = RemoteVariable(partition, variable.path)
    variable._value = None
    variable._initializer = away
    variable._direct_assign = away.refuse  # where `assign` ends, which would look into `_value`
    waiting = global_state.get_global_attribute("uninitialized_variables") or []
    for i, other in enumerate(waiting):
        if other is variable:
            del waiting[i]
            break


def make_local(variable: Any, value: np.ndarray) -> None:
    """Undo `make_remote`: the variable has `value` from now on."""
    del variable._direct_assign
    variable._initialize(value)
    variable._initializer = None


def is_remote(variable: Any) -> RemoteVariable | None:
    """The initializer that replaces the value of `variable`; None: the value is here."""
    away = getattr(variable, "_initializer", None)
    return away if isinstance(away, RemoteVariable) and variable._value is None else None
