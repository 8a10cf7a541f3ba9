"""How much memory an optimizer keeps for each variable, found out on a small one."""

from __future__ import annotations

import math
from typing import Any

import keras

_SHAPE = (8, 8)


def state_factor(optimizer: Any) -> float:
    """Bytes for each byte of a trainable variable: itself, its gradient and optimizer slots.

    4 for Adam, 3 for SGD with momentum, 2 for SGD, and 1 without an optimizer.
    """
    if optimizer is None:
        return 1.0
    try:
        copy = type(optimizer).from_config(optimizer.get_config())
    except Exception:  # an optimizer of the user's own need not have a config; Adam's is a guess
        return 4.0
    copy.build([keras.Variable(keras.ops.zeros(_SHAPE), name="probe")])
    slots = sum(math.prod(v.shape) for v in copy.variables if len(v.shape))
    return 2.0 + slots / math.prod(_SHAPE)
