"""Check the keys of tf_distribute together, and parse them; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.config.backend_keys import TfDistributeConfig
    from ktrainer.config.schema import Config

IN_ONE_PROCESS = ("default", "one_device", "mirrored", "central_storage", "tpu")
_DEVICE = re.compile(r"/?(?:device:)?(CPU|GPU):(\d+)", re.IGNORECASE)

# Keys that only some strategies use, and which ones.
_USED_BY = {
    "devices": ("one_device", "mirrored", "central_storage", "multi_worker_mirrored"),
    "cross_device_ops": ("mirrored",),
    "communication": ("multi_worker_mirrored",),
    "timeout": ("multi_worker_mirrored", "parameter_server"),
    "start_timeout": ("multi_worker_mirrored", "parameter_server"),
    "join": ("parameter_server",),
    "min_shard_bytes": ("parameter_server",),
    "bytes_per_pack": ("multi_worker_mirrored",),
    "auto_shard": ("multi_worker_mirrored", "tpu"),
    "tpu": ("tpu",),
}


def check_strategy(config: Config, backend: TfDistributeConfig) -> None:
    """Refuse keys that contradict one another.

    Raises:
        ConfigError: for the first one found.
    """
    _check_used(backend)
    _check_sharding(config, backend)
    _check_devices(backend)
    _check_step(config, backend)


def _check_used(backend: TfDistributeConfig) -> None:
    default = type(backend)()
    for key, users in _USED_BY.items():
        value = getattr(backend, key)
        if value != getattr(default, key) and backend.strategy not in users:
            raise ConfigError(
                f"has no effect with strategy={backend.strategy}; it is for "
                f"{' and '.join(users)}. Remove it, or choose another strategy.",
                path=f"backend.{key}",
                value=value,
                needs=["backend.strategy"],
            )


def _check_devices(backend: TfDistributeConfig) -> None:
    devices = asked_devices(backend.devices)
    count = len(devices) if isinstance(devices, list) else devices or 1
    if backend.strategy == "one_device" and count > 1:
        _refuse_devices(backend.devices, "one_device uses one: choose mirrored for several")


def _check_step(config: Config, backend: TfDistributeConfig) -> None:
    if backend.strategy == "parameter_server" and config.trainer.asks_for_several_steps:
        raise ConfigError(
            "several steps per call are one function, but parameter_server schedules single steps "
            "on workers. Set trainer.steps_per_call=1.",
            path="trainer.steps_per_call",
            value=config.trainer.steps_per_call,
        )
    if backend.strategy == "tpu" and config.trainer.loss_scope == "global":
        raise ConfigError(
            "global gathers the rows of all replicas within the step, whose number a TPU's "
            "compiler does not know. Set trainer.loss_scope=local, or choose strategy=mirrored.",
            path="trainer.loss_scope",
            value="global",
        )
    if backend.strategy in ("central_storage", "parameter_server") and config.trainer.xla:
        raise ConfigError(
            "XLA cannot read weights that are on another device, as those of "
            f"{backend.strategy} are. Choose strategy=mirrored, multi_worker_mirrored on several "
            "processes, or set trainer.xla=false.",
            path="trainer.xla",
            value=True,
        )


def with_sharding(config: Config) -> Config:
    """The configuration with `data.shard` as `backend.auto_shard` has it, for `fit`."""
    if getattr(config.backend, "auto_shard", None) != "file" or config.data.shard != "batch":
        return config
    return replace(config, data=replace(config.data, shard="file"))


def _check_sharding(config: Config, backend: TfDistributeConfig) -> None:
    """Check that `fit` reads by `data` what `trainer.distribute` reads by `auto_shard`."""
    data = config.data
    if backend.auto_shard == "file" and data.shard == "element":
        _refuse_sharding(
            "file",
            "contradicts data.shard=element, by which `fit` splits the data: remove one of them. "
            "file implies data.shard=file.",
        )
    if backend.auto_shard == "off" and data.shard != "batch":
        _refuse_sharding(
            "off",
            f"contradicts data.shard={data.shard}, which gives each process a part: remove one of "
            "them.",
        )
    if backend.auto_shard == "off" and data.batch == "global":
        _refuse_sharding(
            "off",
            "gives each process all of its pipeline, but with data.batch=global the processes "
            "split each batch. Set data.batch=per_worker, and each trains on its own batches; or "
            "remove auto_shard.",
            needs=["data.batch"],
        )


def _refuse_sharding(value: str, why: str, needs: Sequence[str] = ()) -> None:
    raise ConfigError(why, path="backend.auto_shard", value=value, needs=needs)


def asked_devices(value: Any) -> int | list[str] | None:
    """`backend.devices` as a number, a list of `"GPU:0"`-like names, or None for all.

    Raises:
        ConfigError: it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            _refuse_devices(value, "at least one device must compute")
        return value
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        _refuse_devices(value, "give a number, or a list such as [GPU:0,GPU:1]")
    names = []
    for name in value:
        match = _DEVICE.fullmatch(str(name))
        if match is None:
            _refuse_devices(name, "devices are named GPU:0, GPU:1, ... or CPU:0, CPU:1, ...")
        else:
            names.append(f"{match[1].upper()}:{int(match[2])}")
    if len(set(names)) < len(names):
        _refuse_devices(value, "a device is listed twice")
    if len({name[:3] for name in names}) > 1:
        _refuse_devices(value, "CPUs and GPUs cannot be mixed: choose one kind")
    return names


def _refuse_devices(value: Any, why: str) -> None:
    raise ConfigError(f"{why}; got {value!r}.", path="backend.devices", value=value)
