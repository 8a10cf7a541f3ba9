"""Drop from TensorBoard's files what will be written again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf


def drop_events(folder: Path, first: int) -> None:
    """Drop the values of all steps from `first` on from the files in `folder`, which no writer has
    open.

    A file whose values all stay is not touched, unless a killed process has left it incomplete.
    """
    for file in sorted(folder.glob("events.out.tfevents.*")):
        events, is_whole = _events(file)
        kept = [
            data for data, event in events if not event.HasField("summary") or event.step < first
        ]
        if is_whole and len(kept) == len(events):
            continue
        temporary = file.with_name(f".{file.name}.tmp")
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for data in kept:
                writer.write(data)
        os.replace(temporary, file)


def _events(file: Path) -> tuple[list[tuple[bytes, Any]], bool]:
    """The events of a file, as bytes and read, and whether it is complete."""
    found: list[tuple[bytes, Any]] = []
    try:
        for data in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            found.append((data, tf.compat.v1.Event.FromString(data)))
    except tf.errors.DataLossError:
        return found, False
    return found, True
