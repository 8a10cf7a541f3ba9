"""Error of a model that cannot be traced: the reason, the line of code, the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import ModelError

_KTRAINER = Path(__file__).resolve().parents[3]
_LIBRARIES = tuple(
    f"{os.path.abspath(folder)}{os.sep}"
    for folder in (_KTRAINER, *(Path(str(module.__file__)).parent for module in (keras, np, tf)))
)
_REASONS = (
    (
        ("as a Python bool", "as a Python `bool`", "as a boolean", "truth value"),
        "Python control flow depends on the values of a tensor",
    ),
    (
        ("attribute 'numpy'", "convert a symbolic", "convert a KerasTensor", "to a numpy array"),
        "it reads the values of a tensor, which do not exist while tracing",
    ),
    (
        ("cannot be used as input to a TensorFlow function",),
        "it calls a TensorFlow function on a symbolic tensor",
    ),
    (
        ("Attempt to convert a value (None)", "NoneType", "got None", "elements of (None"),
        "it uses a dimension, such as that of the batch, that is not known when tracing",
    ),
)
_REMEDY = (
    "Only calls of layers and of `keras.ops` can be cut into stages. Write this line with "
    "`keras.ops` (`ops.where` or `ops.cond` for control flow, -1 for an unknown dimension), or "
    "move the code into a `keras.layers.Layer` of its own: a layer may do anything, since it is "
    "kept in one piece. Stages are then set by hand, where wanted, with "
    "`with ktrainer.partition(i):` around the creation or call of layers, or with backend.stages."
)


class SideEffect(Exception):
    """Code adds a loss or assigns a variable, which only a layer that is one node may do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._keras_call_info_injected = True  # Keras leaves the message as it is


def untraceable(model: Any, error: BaseException, where: str | None = None) -> ModelError:
    """The error that a model cannot be traced, from the exception that its code raised.

    Args:
        where: file and line, if they are not in the exception's traceback.
    """
    where = where or location_of(error.__traceback__)
    at = f" at {where}" if where else ""
    reason, said = reason_of(error), _as_raised(error)
    details = reason if said in reason or reason in said else f"{reason} ({said})"
    return ModelError(
        f"{type(model).__name__} {model.name!r} cannot be traced into a graph of layers, which a "
        f"pipeline needs: its code failed{at}: {details}. {_REMEDY}"
    )


def refuse_compiled_call(layer: Any) -> None:
    """Refuse a layer whose `call` is a `tf.function`: it keeps the weights that it first read,
    which a pipeline replaces in each step.

    Raises:
        ModelError: it is one.
    """
    if isinstance(layer.call, tf.types.experimental.PolymorphicFunction):
        raise ModelError(
            f"the `call` of {type(layer).__name__} {layer.name!r} is a tf.function, which keeps "
            "weights that a pipeline replaces in each step. Remove tf.function from `call`: a "
            "pipeline compiles its stages itself"
        )


def reason_of(error: BaseException) -> str:
    """Describe in a few words what does not work on symbolic tensors."""
    text = str(error)
    if isinstance(error, SideEffect):
        return text
    for marks, reason in _REASONS:
        if any(mark in text for mark in marks):
            return reason
    return f"it raised {_as_raised(error)}"


def location_of(
    start: FrameType | TracebackType | None, until: CodeType | None = None
) -> str | None:
    """`file:line` of the innermost frame of the user's own code.

    Args:
        start: a traceback, or the frame to go outwards from.
        until: look no further out than a frame of this code.
    """
    found = None
    for frame, line in _frames(start):
        if frame.f_code is until:
            break
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            found = f"{frame.f_code.co_filename}:{line}"
            if isinstance(start, FrameType):
                break
    return found


def _frames(start: FrameType | TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Frames and lines: outwards from a frame, inwards along a traceback."""
    while isinstance(start, TracebackType):
        yield start.tb_frame, start.tb_lineno
        start = start.tb_next
    while isinstance(start, FrameType):
        yield start, start.f_lineno
        start = start.f_back


def _as_raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_sentences(error)}"


def _first_sentences(error: BaseException, limit: int = 160) -> str:
    text = str(error).partition("Arguments received by")[0]
    # Keras puts the layer's name before the cause.
    text = text.partition("Error encountered:")[2] or text
    text = " ".join(text.replace("\x1b[1m", "").replace("\x1b[0m", "").split())
    return text.rstrip(".") if len(text) <= limit else text[: limit - 3].rstrip() + "..."
