"""Write logs as TensorBoard scalars; images of users, the graph and the settings.

Events used: `on_train_begin`, `on_log`, `on_validation_end`, `on_epoch_end`, `on_restore` (drop
what will be written again), `on_train_end`, `close`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktrainer.callbacks.reporter import Reporter
from ktrainer.distributed import World
from ktrainer.errors import ConfigError, SetupError
from ktrainer.runtime.folder_lock import FolderLock
from ktrainer.state.durations import Duration
from ktrainer.state.nested_logs import as_floats, flat
from ktrainer.state.progress import Progress

_PARTS = ("train", "validation", "epoch")
_SCALARS, TENSORS, _BLOBS = 1, 2, 3  # DATA_CLASS_* in tensorflow/core/framework/summary.proto


class TensorBoardLog(Reporter):
    """Write scalars over global steps: `train/` and `validation/`, with the same tags, so that
    TensorBoard draws them into the same charts, and `epoch/` for an epoch's training results.
    With a trainer, also its configuration as hyperparameters and the graph of the step, where a
    step is one function. `image` writes images.

    Args:
        directory: their folder; default: `tensorboard` in the run's folder, `tensorboard-2` for a
            second `fit`. Needed without a trainer.
        every: see `Reporter`.
        world: the ranks; default: the trainer's, or this process's.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        every: str | Duration = "50ba",
        world: World | None = None,
    ) -> None:
        super().__init__(every, world)
        self._given = Path(directory) if directory is not None else None
        self.directory = self._given
        self._writers: dict[str, Any] = {}
        self._graph_written = False
        self._validated = -1  # the step of the last validation inside an epoch
        self._ended: list[tuple[int, dict[str, float]]] = []  # step and validation of each epoch
        self._kept = False  # the files hold values of this run alone
        self._lock: FolderLock | None = None  # of a given folder
        self._early: list[tuple[str, Any, int]] = []  # images from before they do

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.directory = self._given or self.run_path("tensorboard")
        if self.directory is None:
            raise ConfigError("give the folder of the scalars: TensorBoardLog('logs').")
        self._kept = self._graph_written = False
        self._validated = -1
        self._ended = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if not self._kept:  # it begins from scratch
            self._drop_from(dict.fromkeys(_PARTS, 0))
        early, self._early = self._early, []
        for name, images, step in early:
            self.image(name, images, step)

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._write("train", step, logs)
        self._write_graph()

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._validated = step
        self._write("validation", step, {k.removeprefix("val_"): v for k, v in logs.items()})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        values, step = as_floats(logs), self.progress.step
        validation = {k.removeprefix("val_"): v for k, v in values.items() if k.startswith("val_")}
        self._write("epoch", step, {k: v for k, v in values.items() if not k.startswith("val_")})
        if step != self._validated:
            self._write("validation", step, validation)
        self._ended.append((step, validation))
        for writer in self._writers.values():
            writer.flush()

    def on_restore(self, progress: Progress) -> None:
        """Drop what will be written again: an epoch that is not finished ends once more. After a
        rollback the epochs that have ended do not: their values stand, and their validation is
        written again, as other validations at these steps are dropped."""
        self.close()
        step, returned = progress.step, self.train_state.update_invalid
        cut = progress.batch > 0 and not returned
        self._validated = step if progress.validated else -1
        again = {"train": step + 1, "epoch": step if cut else step + 1}
        again["validation"] = step if cut and not progress.validated else step + 1
        if returned:
            del again["epoch"]
        else:
            self._ended = [each for each in self._ended if each[0] < again["epoch"]]
        self._drop_from(again)
        if self._given is None:  # else nothing was dropped
            for end, validation in self._ended:
                if end > step:
                    self._write("validation", end, validation)

    def _drop_from(self, steps: Mapping[str, int]) -> None:
        """Drop values from a step on, by part; not from a folder that other runs may write to."""
        self._kept = True
        if not self.reports or self.directory is None or self._given is not None:
            return
        for part, first in steps.items():
            _drop_events(self.directory / part, first)

    def image(self, name: str, images: Any, step: int | None = None) -> None:
        """Write images, on rank 0.

        Args:
            images: of shape (number, height, width, channels), with 1, 3 or 4 channels: uint8, or
                floats from 0 to 1.
            step: default: the updates done.
        """
        if not self.reports:
            return
        step = self.progress.step if step is None else step
        if not self._kept and self._given is None:
            self._early.append((name, images, step))
            return
        import tensorflow as tf

        pixels = tf.image.convert_image_dtype(images, tf.uint8, saturate=True)
        _, height, width, _ = pixels.shape
        encoded = [tf.io.encode_png(each) for each in pixels]
        sizes = [tf.strings.as_string(width), tf.strings.as_string(height)]
        with self._writer("train").as_default(step):
            write_summary(name, tf.stack([*sizes, *encoded]), "images", _BLOBS)

    def _write_graph(self) -> None:
        """Write the graph of the compiled step, where one function makes an update; once."""
        program = self.train_state.program if self.trainer is not None else None
        graphs = [] if program is None or self._graph_written else program.graphs
        if len(graphs) != 1 or not self.reports:
            return
        import tensorflow as tf

        self._graph_written = True
        with self._writer("train").as_default(0):
            tf.summary.graph(graphs[0])

    def _write_settings(self) -> None:
        """Write the configuration as hyperparameters, if the tensorboard package is installed."""
        if self.trainer is None or find_spec("tensorboard") is None:
            return
        import tensorflow as tf
        from tensorboard.plugins.hparams import api

        settings = flat(self.trainer.config.to_dict(redacted=True))
        known = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in settings.items()}
        with self._writers["train"].as_default(0):
            tf.summary.experimental.write_raw_pb(api.hparams_pb(known).SerializeToString(), 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _write(self, part: str, step: int, values: Mapping[str, float]) -> None:
        if not self.reports or not values:
            return
        import tensorflow as tf

        with self._writer(part).as_default(step):
            for name, value in values.items():
                write_summary(name, tf.constant(value, tf.float32), "scalars", _SCALARS)

    def _writer(self, part: str) -> Any:
        import tensorflow as tf

        if part not in self._writers:
            assert self.directory is not None
            if not self._writers and self._given is not None:
                self._lock = _hold(self._given)
            self._writers[part] = tf.summary.create_file_writer(str(self.directory / part))
            if part == "train":
                self._write_settings()
        return self._writers[part]


def _hold(folder: Path) -> FolderLock | None:
    """Hold a folder that the user has given, while it is written to; warn, where another process
    writes to it. The folder of a run is that of one job anyway."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder, "TensorBoard folder")
    except SetupError:
        warnings.warn(
            f"another process writes to the TensorBoard folder {folder}, too: TensorBoard draws "
            "the values of both as one run. Give each one a folder of its own.",
            stacklevel=4,
        )
    except OSError:  # TensorFlow's writer says why
        pass
    return None


def write_summary(name: str, tensor: Any, plugin: str, kind: int) -> None:
    """Write a tensor as `tf.summary.scalar` and its like do, which need the tensorboard package.

    Args:
        plugin: of TensorBoard: scalars, histograms or images.
        kind: `data_class` of tensorflow/core/framework/summary.proto.
    """
    import tensorflow as tf

    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin), data_class=kind
    )
    tf.summary.write(name, tensor, metadata=metadata)


def _drop_events(folder: Path, first: int) -> None:
    """Drop the values of all steps from `first` on from the files in `folder`, which no writer has
    open.

    A file whose values all stay is not touched, unless a killed process has left it incomplete.
    """
    import tensorflow as tf

    for file in sorted(folder.glob("events.out.tfevents.*")):
        events, is_whole = _read_events(file)
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


def _read_events(file: Path) -> tuple[list[tuple[bytes, Any]], bool]:
    """The events of a file, as bytes and parsed, and whether the file is complete."""
    import tensorflow as tf

    found: list[tuple[bytes, Any]] = []
    try:
        for data in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            found.append((data, tf.compat.v1.Event.FromString(data)))
    except tf.errors.DataLossError:
        return found, False
    return found, True
