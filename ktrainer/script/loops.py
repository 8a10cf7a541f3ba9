"""Custom training loops, which apply gradients themselves, cannot be routed: they are named."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ktrainer.errors import ModelError

if TYPE_CHECKING:
    from ktrainer.script.replace import Replacements
    from ktrainer.trainer import Trainer

_LIBRARIES = (
    *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
    "<",
)


def refuse_loops(trainer: Trainer, replaced: Replacements, routed: Callable[[], bool]) -> None:
    """Refuse `optimizer.apply` and `apply_gradients` outside of routed calls.

    Each rank would apply the gradients of its own copy of the data, or a strategy's not at all.

    Args:
        routed: whether a routed call is under way.
    """

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not routed() and not _under_strategy_of(trainer):
                _refuse(trainer)
            return original(self, *args, **kwargs)

        return apply

    for name in ("apply", "apply_gradients"):
        replaced.replace(BaseOptimizer, name, refuse)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that belongs to the user's code."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "__autograph_generated_file" in file


def _under_strategy_of(trainer: Trainer) -> bool:
    """Whether this is a replica of the Trainer's strategy, run by the script itself."""
    strategy = getattr(trainer.backend, "strategy", None)
    return (
        strategy is not None
        and tf.distribute.has_strategy()
        and (tf.distribute.get_strategy() is strategy)
    )


def _refuse(trainer: Trainer) -> NoReturn:
    frame = users_frame(sys._getframe(1))
    where = ""
    if frame is not None:
        where = f" ({frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name})"
    raise ModelError(
        f"this script applies gradients in a loop of its own{where}, which cannot be shared by "
        f"{trainer.world.size} ranks with backend={trainer.backend.name} unless it goes through "
        "Keras: put the step into a `train_step` of a keras.Model and call `fit`, or use "
        "`trainer.run` of a ktrainer.Trainer with backend=tf_distribute; or run it in one process "
        "with backend=local."
    )
