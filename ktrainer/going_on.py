"""What a command lacks to go on from the checkpoint that it has left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktrainer.trainer import Trainer


def to_add(trainer: Trainer, checkpoint: str | Path) -> str:
    """The `key=value` with which the command of this run goes on from `checkpoint`; empty where
    the same command does, because it names its folder and looks there.

    Args:
        trainer: of the `fit` that has saved it.
        checkpoint: the folder of the checkpoint.
    """
    if trainer.config.trainer.fast_dev_run:  # it has no folder
        return f"checkpoint.resume={checkpoint}"
    folder = trainer.checkpoint_dir.absolute()
    if Path(checkpoint).absolute().parent == folder:
        begins_there = _begins_in(trainer, folder)
        if begins_there and _is_named(trainer):
            return ""
        if trainer.fits > 1:  # a path is where the first call of `fit` begins
            words = [] if _is_named(trainer) else [f"run.dir={trainer.run_dir}"]
            return " ".join([*words, *([] if begins_there else ["checkpoint.resume=auto"])])
    return f"checkpoint.resume={checkpoint}"


def _begins_in(trainer: Trainer, folder: Path) -> bool:
    """Whether the run begins with the newest checkpoint of its own folder."""
    mode = trainer.config.checkpoint.resume
    if mode in ("auto", "never") or trainer.fits > 1:
        return mode == "auto"
    named = Path(mode).absolute()
    return folder in (named, named / "checkpoints")


def _is_named(trainer: Trainer) -> bool:
    """Whether another start has the same folder of checkpoints."""
    run_dir = trainer.config.run.dir
    return bool(trainer.config.checkpoint.dir) or (run_dir is not None and "{time}" not in run_dir)
