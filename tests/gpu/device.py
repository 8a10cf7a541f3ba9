"""The device that these tests train on: the first GPU, or the CPU in its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from glob import glob
from typing import Literal

from ktrainer.runtime.hardware import tensorflow_has_cuda
from tests.processes import python

_HIDDEN = "-1"
_FIND = "import tensorflow as tf; tf.config.list_logical_devices('GPU')"


@dataclass(frozen=True)
class Device:
    """What ranks compute on.

    Attributes:
        kind: `"GPU"` or `"CPU"`, as TensorFlow names them.
        environment: variables of the ranks.
    """

    kind: Literal["GPU", "CPU"]
    environment: dict[str, str]

    @property
    def is_gpu(self) -> bool:
        return self.kind == "GPU"


CPU = Device("CPU", {"CUDA_VISIBLE_DEVICES": _HIDDEN})


def chosen_device(asked: str) -> Device:
    """The device for a value of `--gpu-device`."""
    if asked == "cpu":
        return (
            CPU if _asked_gpus() else Device("CPU", {})
        )  # ranks see no GPU unless one is asked for
    return Device("GPU", {"CUDA_VISIBLE_DEVICES": (_asked_gpus() or ["0"])[0]})


def why_no_gpu() -> str | None:
    """Why there is no GPU, as far as can be told without loading CUDA; None: there may be one."""
    if not glob("/dev/nvidia[0-9]*"):
        return "no GPU: this host has no /dev/nvidia0"
    if _HIDDEN in _asked_gpus():
        return f"no GPU: CUDA_VISIBLE_DEVICES={_HIDDEN} hides it"
    if not tensorflow_has_cuda():
        return 'no GPU: TensorFlow is built for CPUs here (pip install "tensorflow[and-cuda]")'
    return None


def log_without_gpu(device: Device) -> str:
    """What TensorFlow logs as it looks for GPUs and finds none."""
    done = python("-c", _FIND, TF_CPP_MIN_LOG_LEVEL="0", **device.environment)
    return "\n".join(done.stderr.splitlines()[-20:])


def _asked_gpus() -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, which tests/conftest.py sets to nothing if it is unset."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in names if name.strip()]
