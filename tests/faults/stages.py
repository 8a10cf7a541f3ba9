"""Stages of a pipeline that save a checkpoint, one of which cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ktrainer.checkpoint.format.checkpoint_folder as format_module
import ktrainer.checkpoint.stage_parts as parts_module
from ktrainer import distributed
from tests.checkpoint.stages import cut, keeper, whole_model


def save_with_fault(directory: str, partitions: int, faulty: int, fault: str) -> None:
    """One checkpoint, then one in which rank `faulty` cannot do its part."""
    model = whole_model()
    cut(model, partitions)
    callback = keeper(directory, model, [])
    callback.progress.step = 1
    callback.save()
    callback.progress.step = 2
    callback.wait()
    kept = (
        format_module.fault_point,
        Path.is_dir,
        parts_module.write_arrays,
        parts_module.merge_stage_parts,
    )
    if distributed.current_world().rank == faulty:
        _FAULTS[fault]()
    try:
        callback.save()
        callback.on_train_end()
    finally:
        callback.close()
        format_module.fault_point, Path.is_dir = kept[:2]
        parts_module.write_arrays, parts_module.merge_stage_parts = kept[2:]


def _full() -> None:
    def fault_point(at: str, path: Path) -> None:
        if at == "after file":
            raise OSError(28, "No space left on device")

    format_module.fault_point = fault_point


def _no_folder() -> None:
    Path.is_dir = lambda self: False


def _own_disk() -> None:
    write = parts_module.write_arrays

    def on_own_disk(folder: Path, *args: Any) -> Any:
        here = folder.parent.parent / "own"
        here.mkdir()
        return write(here, *args)

    parts_module.write_arrays = on_own_disk


def _bug() -> None:
    def raises(*args: Any) -> Any:
        raise RuntimeError("before anybody was heard")

    parts_module.merge_stage_parts = raises


def _die(at: str) -> Any:
    def fault_point(point: str, path: Path) -> None:
        if point == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def fault() -> None:
        format_module.fault_point = fault_point

    return fault


_FAULTS = {
    "full": _full,
    "no folder": _no_folder,
    "own disk": _own_disk,
    "bug": _bug,
    "dies at a file": _die("after file"),
    "dies at the rename": _die("before rename"),
}
