"""Checkpoints: what a run saves, when, and how it continues from them.

checkpoint_callback.py  when a checkpoint is due; best_metric.py: which value is better
background_writer.py    writes it while training continues
contents/               what is in it: run, model, data, metrics, callbacks
format/                 how it lies on disk: complete or absent folders, checksums
stage_parts.py          a pipeline's checkpoint: a part from each stage
restore_run.py          continues a run from one
export/                 one as an ordinary Keras file
tf_checkpoint/          imports those of tf.train.Checkpoint
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktrainer.checkpoint.contents.capture_state import capture
    from ktrainer.checkpoint.export.keras_file import save_model
    from ktrainer.checkpoint.format.checkpoint_reader import read_checkpoint, verify
    from ktrainer.checkpoint.format.checkpoint_store import Store
    from ktrainer.checkpoint.restore_run import resume

_HOME = {
    "Store": "format.checkpoint_store",
    "capture": "contents.capture_state",
    "read_checkpoint": "format.checkpoint_reader",
    "resume": "restore_run",
    "save_model": "export.keras_file",
    "verify": "format.checkpoint_reader",
}

__all__ = [
    "Store",
    "capture",
    "read_checkpoint",
    "resume",
    "save_model",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
