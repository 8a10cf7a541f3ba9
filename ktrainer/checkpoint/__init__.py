"""Checkpoints: the format on disk, which ones are kept, what is in them, and how to go on.

The parts of this package:

    format.py    one folder, written whole or not at all
    shards.py    one file of arrays, as safetensors
    reading.py   all of a folder is checked before any of it is believed
    encoding.py  what JSON and safetensors have no word for; checksums.py: BLAKE3
    store.py     the folders of a run: list, latest, best, prune
    state.py     the whole state of a run <-> arrays and JSON
                 of callbacks: callback_state.py; of metrics and data inside an epoch:
                 metric_state.py, data_state.py; run_state.py: is it of that form?
    matching.py  which saved array belongs to which variable
    snapshot.py  a copy of that state in host memory
    saver.py     writes snapshots behind the training
    parts.py     one checkpoint that all stages of a pipeline write at once
    callback.py  when a run saves; it is `ktrainer.callbacks.Checkpoint`
                 direction.py: is a high or a low value best?
    resuming.py  all ranks go on from what rank 0 reads
    export.py    the trained model as a `.keras` file
    rebuild.py   a checkpoint as a Keras file, without the script; foreign.py: what it refuses
    command.py   `ktrainer checkpoint`; find.py: which checkpoints a path names
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktrainer.checkpoint.export import save_model
    from ktrainer.checkpoint.reading import read_checkpoint, verify
    from ktrainer.checkpoint.resuming import resume
    from ktrainer.checkpoint.state import capture
    from ktrainer.checkpoint.store import Store

_HOME = {
    "Store": "store",
    "capture": "state",
    "read_checkpoint": "reading",
    "resume": "resuming",
    "save_model": "export",
    "verify": "reading",
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
