"""Detect custom loops, and files that every rank writes."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ktrainer.callbacks.base import collectives_off
from ktrainer.errors import ModelError

if TYPE_CHECKING:
    from ktrainer.runtime.monkeypatching import Replacements
    from ktrainer.trainer import Trainer

_LIBRARIES = (
    *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")},
    site.getusersitepackages(),
    str(Path(__file__).parents[1]),
    "<",
)
_WRITES = ("w", "a", "x")
_made: set[str] = set()  # temporary files and folders of this process
_reported: set[str] = set()


def refuse_loops(trainer: Trainer, replaced: Replacements, routed: Callable[[], bool]) -> None:
    """Refuse `optimizer.apply` and `apply_gradients` outside of routed calls.

    Each rank would apply the gradients of its own copy of the data.

    Args:
        routed: whether a routed call is active.
    """

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not routed() and not _under_strategy_of(trainer):
                _refuse(trainer)
            return original(self, *args, **kwargs)

        return apply

    for name in ("apply", "apply_gradients"):
        replaced.wrap(BaseOptimizer, name, refuse)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from `frame` outwards."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "__autograph_generated_file" in file


def _under_strategy_of(trainer: Trainer) -> bool:
    """Return whether the script runs this code as a replica of the Trainer's strategy."""
    strategy = trainer.backend.strategy
    return (
        strategy is not None
        and tf.distribute.has_strategy()
        and (tf.distribute.get_strategy() is strategy)
    )


def _refuse(trainer: Trainer) -> NoReturn:
    if collectives_off():
        raise ModelError(
            "fit was called on rank 0 alone, inside @ktrainer.rank_zero_only; call it on all ranks."
        )
    frame = _users_frame(sys._getframe(1))
    where = ""
    if frame is not None:
        where = f" ({frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name})"
    error = ModelError(
        f"this script applies gradients in its own loop{where}. ktrainer cannot split such a loop "
        f"over ranks, replicas or stages (backend={trainer.backend.name}). Put the step into "
        "`train_step` of a keras.Model and call `fit`; or make a ktrainer.Trainer, whose `run` "
        "calls a step under all backends but pipeline; or keep the loop and average its gradients "
        "with ktrainer.dataparallel; or run one process with backend=local."
    )
    error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph repeats its code above
    raise error


def watch_files(rank: int) -> None:
    """Warn once about each line of the script that opens files for writing: on rank 1, for all."""
    if rank == 1:
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, _ = args
        if isinstance(mode, str) and mode.startswith(_WRITES) and isinstance(path, str):
            _opened(os.path.abspath(path))
    elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        _made.add(os.path.abspath(args[0]))


def _opened(path: str) -> None:
    made = tuple(_made)  # another thread may add to it
    if path.startswith(("/dev/", "/proc/", *made)) or str(os.getpid()) in path:
        return
    if os.path.isdir(path):  # a temporary file without a name
        return
    frame = _users_frame(sys._getframe(2))
    if frame is None or not _by_the_script(frame.f_code.co_filename):
        return
    line = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    if line in _reported:  # a loop over many files
        return
    _reported.add(line)
    print(
        f"ktrainer run: every rank writes {path} ({line}): let rank 0 alone do it, in a function "
        "under @ktrainer.rank_zero_only",
        file=sys.stderr,
        flush=True,
    )


def _by_the_script(file: str) -> bool:
    """Return whether a source file is in the script's folder, or below it."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(script)) if script else None
    return folder is not None and os.path.abspath(file).startswith(os.path.join(folder, ""))
