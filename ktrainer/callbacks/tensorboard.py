"""Write logs as TensorBoard scalars.

Events used: `on_train_begin`, `on_log`, `on_validation_end`, `on_epoch_end`, `on_train_end`,
`close`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.callbacks.base import as_floats
from ktrainer.callbacks.reporter import Reporter
from ktrainer.distributed import World
from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration

_SCALARS = 1  # DATA_CLASS_SCALAR in tensorflow/core/framework/summary.proto


class TensorBoardLog(Reporter):
    """Write scalars over global steps: `train/` and `validation/`, with the same tags, so that
    TensorBoard draws them into the same charts, and `epoch/` for an epoch's training results.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.directory = self._given or self.run_path("tensorboard")
        if self.directory is None:
            raise ConfigError("give the folder of the scalars: TensorBoardLog('logs').")

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._write("train", step, logs)

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._write("validation", step, {k.removeprefix("val_"): v for k, v in logs.items()})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        values, step = as_floats(logs), self.progress.step
        validation = {k.removeprefix("val_"): v for k, v in values.items() if k.startswith("val_")}
        self._write("epoch", step, {k: v for k, v in values.items() if not k.startswith("val_")})
        self._write("validation", step, validation)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self, part: str, step: int, values: Mapping[str, float]) -> None:
        if not self.reports or not values:
            return
        import tensorflow as tf

        if part not in self._writers:
            assert self.directory is not None
            self._writers[part] = tf.summary.create_file_writer(str(self.directory / part))
        # As `tf.summary.scalar`, which needs the tensorboard package.
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
            data_class=_SCALARS,
        )
        with self._writers[part].as_default(step):
            for name, value in values.items():
                tf.summary.write(name, tf.constant(value, tf.float32), metadata=metadata)
