"""The layout of a `tf.distribute` strategy, or the reason why it cannot run here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob

from ktrainer.config import TfDistributeConfig
from ktrainer.config.strategy_checks import IN_ONE_PROCESS, asked_devices
from ktrainer.errors import ConfigError


@dataclass(frozen=True)
class StrategyPlan:
    """The devices and processes of a strategy.

    Attributes:
        strategy: its name.
        devices: devices of each process that compute, such as `"GPU:0"`.
        processes: processes that compute.
        logical: how many logical CPU devices have to be made; 0 leaves the CPU as it is.
    """

    strategy: str
    devices: tuple[str, ...]
    processes: int = 1
    logical: int = 0

    def __str__(self) -> str:
        if self.strategy == "default":
            return "default (no strategy)"
        each = ", ".join(self.devices)
        if self.strategy in IN_ONE_PROCESS:
            return f"{self.strategy} on {each}"
        if self.strategy == "parameter_server":
            return f"{self.strategy}, {self.processes} worker{'s' * (self.processes != 1)}"
        if self.processes == 1:
            return f"{self.strategy}, 1 process with {each}"
        return f"{self.strategy}, {self.processes} processes with {each} each"


def plan_strategy(
    backend: TfDistributeConfig,
    *,
    size: int,
    gpus: int,
    workers: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> StrategyPlan:
    """The layout of a strategy.

    Args:
        backend: the configuration's section.
        size: processes that were, or will be, started.
        gpus: GPUs of this node that one process may use.
        workers: workers of a cluster with parameter servers; None: there is no such cluster.
        environ: searched for the address of a TPU.

    Raises:
        ConfigError: it cannot run here; names what to use instead.
    """
    _check_strategy(backend, size, workers, environ)
    if not gpus:
        _check_without_gpus(backend)
    name = backend.strategy
    if name == "tpu":
        return StrategyPlan(name, ("all cores of the TPU",))
    devices, logical = _devices(backend, gpus)
    return StrategyPlan(name, devices, workers or size, logical)


def _check_strategy(
    backend: TfDistributeConfig, size: int, workers: int | None, environ: Mapping[str, str]
) -> None:
    name = backend.strategy
    if name in IN_ONE_PROCESS and size > 1:
        _refuse(
            "strategy",
            name,
            f"{name} is one process with its devices, but {size} were started: set "
            "backend.strategy=multi_worker_mirrored (or backend=data_parallel), or start one.",
        )
    if name == "tpu" and not tpu_found(backend, environ):
        _refuse(
            "strategy",
            name,
            "there is no TPU here: set backend.tpu to its name or address, or choose "
            "strategy=mirrored.",
        )
    if name == "parameter_server" and workers is None:
        _refuse(
            "strategy",
            name,
            "parameter_server needs a cluster of workers and servers: start with `ktrainer run "
            "--workers 2 --servers 1` on one host, or set TF_CONFIG in each process on several.",
        )


def tpu_found(backend: TfDistributeConfig, environ: Mapping[str, str]) -> bool:
    """Return whether the configuration, the environment or the machine names a TPU."""
    named = backend.tpu or environ.get("TPU_NAME") or environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
    return bool(named or glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"))


def _check_without_gpus(backend: TfDistributeConfig) -> None:
    if backend.cross_device_ops == "nccl":
        _refuse(
            "cross_device_ops",
            "nccl",
            "NCCL needs GPUs, and there are none: use reduction_to_one_device, "
            "hierarchical_copy or auto.",
        )
    if backend.communication == "nccl":
        _refuse("communication", "nccl", "NCCL needs GPUs, and there are none: use ring or auto.")


def _devices(backend: TfDistributeConfig, gpus: int) -> tuple[tuple[str, ...], int]:
    """Names of the devices that compute, and logical CPU devices to make."""
    asked = asked_devices(backend.devices)
    kind = "GPU" if gpus else "CPU"
    if asked is None:
        one = backend.strategy in ("default", "one_device")
        count = 1 if one or not gpus else gpus
        return tuple(f"{kind}:{i}" for i in range(count)), 0
    names = tuple(f"{kind}:{i}" for i in range(asked)) if isinstance(asked, int) else tuple(asked)
    numbers = [int(name[4:]) for name in names]
    if names[0].startswith("GPU"):
        if max(numbers) >= gpus:
            have = f"there {'is' if gpus == 1 else 'are'} {gpus or 'no'} GPU{'s' * (gpus != 1)}"
            use = f"use a number up to {gpus}" if gpus else "use backend.devices=2 for CPU devices"
            _refuse("devices", backend.devices, f"{have} for each process: {use}.")
        return names, 0
    return names, max(numbers) + 1 if max(numbers) else 0


def _refuse(key: str, value: object, why: str) -> None:
    path = f"backend.{key}"
    raise ConfigError(why, path=path, value=value, needs=[path])
