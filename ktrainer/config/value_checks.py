"""Checks beyond types: bounds, durations, contradictions, and callbacks' names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import NoneType
from typing import Any

from ktrainer.config import callback_registry
from ktrainer.config.backend_keys import (
    DataParallelConfig,
    PipelineConfig,
    TfDistributeConfig,
)
from ktrainer.config.fault_tolerance_checks import check_healing, check_health
from ktrainer.config.name_patterns import compile_pattern
from ktrainer.config.pipeline_checks import check_pipeline
from ktrainer.config.schema import Config
from ktrainer.config.schema_fields import (
    DurationBounds,
    NumberBounds,
    bounds,
    expected,
    hints,
    schema_fields,
)
from ktrainer.config.strategy_checks import check_strategy
from ktrainer.config.watch_checks import check_tracker_arguments, check_watch
from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_UNITS = {"ep": "epochs ('1ep')", "ba": "updates ('500ba')", "s": "time ('10m')"}


def check_values(
    config: Config,
    on_unknown_callback: Callable[[ConfigError], None] | None = None,
    before_script: bool = False,
) -> None:
    """Refuse values out of bounds and keys that contradict one another.

    Args:
        on_unknown_callback: called with the error for a callback that is not registered, instead
            of raising it.
        before_script: raise no error that a script's defaults may settle.

    Raises:
        ConfigError: for the first one found.
    """
    _check_bounds(config, "")
    for check in (
        _check_clip,
        _check_trainer,
        _check_profile,
        _check_signals,
        _check_schedule,
        _check_checkpoint,
        check_healing,
        check_health,
        check_watch,
        check_tracker_arguments,
        _check_backend_keys,
    ):
        try:
            check(config)
        except ConfigError as error:
            if not (before_script and script_may_settle(error, config)):
                raise
    for name, spec in config.callbacks.items():
        try:
            callback_registry.check(spec, allow=config.allow, path=f"callbacks.{name}")
        except callback_registry.UnknownCallback as error:
            if on_unknown_callback is None:
                raise
            on_unknown_callback(error)


def script_may_settle(error: ConfigError, config: Config) -> bool:
    """Whether the value can work with a key that neither a file nor the command line sets."""
    return any(config.origin(key) is None for key in error.needs)


def _check_backend_keys(config: Config) -> None:
    if isinstance(config.backend, DataParallelConfig):
        _check_powersgd(config, config.backend)
        if config.backend.local_layers:
            _check_local_layers(config, config.backend)
    if isinstance(config.backend, PipelineConfig):
        check_pipeline(config, config.backend)
    if isinstance(config.backend, TfDistributeConfig):
        check_strategy(config, config.backend)


def _check_profile(config: Config) -> None:
    given = config.trainer.profile.steps
    if given is None:
        return
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", given)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise ConfigError(
            "give the updates to trace as FIRST-LAST, counted from 1, such as 50-60.",
            path="trainer.profile.steps",
            value=given,
        )


def _check_bounds(group: Any, prefix: str) -> None:
    """Check every number and duration below `group` against the bounds in the schema."""
    for name, item in schema_fields(type(group)).items():
        path, value, bound = prefix + name, getattr(group, name), bounds(item)
        if hasattr(value, "__dataclass_fields__"):
            _check_bounds(value, f"{path}.")
        elif isinstance(value, list) and value and hasattr(value[0], "__dataclass_fields__"):
            for i, entry in enumerate(value):
                _check_bounds(entry, f"{path}[{i}].")
        elif value is not None and isinstance(bound, DurationBounds):
            _check_duration(path, value, bound)
        elif isinstance(bound, NumberBounds) and not isinstance(value, (str, NoneType)):
            wanted = expected(item, hints(type(group))[name])
            _check_number(path, value, bound, wanted)


def _check_duration(path: str, value: str, bound: DurationBounds) -> None:
    length = Duration.parse(value, path, bound.units)
    if length.unit not in bound.units:
        units = " or ".join(_UNITS[u] for u in bound.units)
        raise ConfigError(f"{value!r} must be given in {units}.", path=path, value=value)
    if bound.positive and length.value <= 0:
        raise ConfigError(f"{value!r} must be longer than zero.", path=path, value=value)


def _check_number(path: str, value: float, bound: NumberBounds, wanted: str) -> None:
    limits = []
    if bound.at_least is not None:
        limits.append((value >= bound.at_least, f"at least {bound.at_least:g}"))
    if bound.above is not None:
        limits.append((value > bound.above, f"above {bound.above:g}"))
    if bound.at_most is not None:
        limits.append((value <= bound.at_most, f"at most {bound.at_most}"))
    if bound.fraction and isinstance(value, float):
        limits.append((value <= 1, "at most 1.0, or a whole number of batches"))
    if not math.isfinite(value) or not all(holds for holds, _ in limits):
        words = " and ".join(text for _, text in limits)
        raise ConfigError(f"expected {wanted}, {words}; got {value!r}.", path=path, value=value)


def _check_clip(config: Config) -> None:
    clip = config.trainer.clip
    given = [name for name in hints(type(clip)) if getattr(clip, name) is not None]
    if len(given) > 1:
        them = " and ".join(f"{name}={getattr(clip, name)}" for name in given)
        message = f"{them} exclude one another: keep one and set the others to null."
        raise ConfigError(message, path="trainer.clip", value=given)


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    if trainer.deterministic and config.seed is None:
        message = "true needs a seed, but seed is null: set seed=0, or another number."
        raise ConfigError(message, path="trainer.deterministic", value=True)
    if trainer.overfit_batches and trainer.limit_train_batches is not None:
        raise ConfigError(
            f"{trainer.overfit_batches} contradicts "
            f"trainer.limit_train_batches={trainer.limit_train_batches}: set one of them.",
            path="trainer.overfit_batches",
            value=trainer.overfit_batches,
        )
    if trainer.asks_for_several_steps and trainer.accumulate > 1:
        raise ConfigError(
            f"{trainer.steps_per_call} contradicts trainer.accumulate={trainer.accumulate}: the "
            "parts of an update are calls of their own. Set one of them to 1.",
            path="trainer.steps_per_call",
            value=trainer.steps_per_call,
        )
    if trainer.loss_scope == "global" and trainer.accumulate > 1:
        raise ConfigError(
            f"global contradicts trainer.accumulate={trainer.accumulate}: a loss that couples "
            "examples would see those of one accumulated batch only. Set trainer.accumulate=1, and "
            "make data.batch_size as large as the loss needs.",
            path="trainer.loss_scope",
            value="global",
        )


def _check_powersgd(config: Config, backend: DataParallelConfig) -> None:
    """Refuse the rank alone; a compression that is named may replace PowerSGD of a file."""
    rank, key = backend.powersgd_rank, "backend.compression"
    unused = backend.compression != "powersgd" and key not in config._origins
    if unused and rank != DataParallelConfig.powersgd_rank:
        raise ConfigError(
            f"{rank} has no effect without backend.compression=powersgd: set it, or leave this key "
            "out.",
            path="backend.powersgd_rank",
            value=rank,
            needs=[key],
        )


def _check_local_layers(config: Config, backend: DataParallelConfig) -> None:
    """Refuse what decides by the gradients of all variables, as those of local layers differ."""
    path, trainer = "backend.local_layers", config.trainer
    for i, pattern in enumerate(backend.local_layers):
        compile_pattern(pattern, f"{path}[{i}]")
    what = None
    if trainer.clip.global_norm is not None:
        what = (
            "trainer.clip.global_norm, which scales all gradients by one norm: it would differ "
            "between ranks. Use trainer.clip.norm or trainer.clip.value."
        )
    elif trainer.precision == "mixed_float16":
        what = (
            "trainer.precision=mixed_float16, whose loss scale skips updates by the gradients of "
            "one rank. Use mixed_bfloat16 or float32."
        )
    if what is not None:
        message = f"cannot be combined with {what}"
        raise ConfigError(message, path=path, value=backend.local_layers)


def _check_signals(config: Config) -> None:
    """SIGKILL and SIGSTOP cannot be caught; SIGUSR2 asks a process for its stack."""
    for name in config.trainer.interrupt.signals:
        if name not in _SIGNALS:
            raise ConfigError(
                f"{name!r} is none of {', '.join(_SIGNALS)}.",
                path="trainer.interrupt.signals",
                value=name,
                known=_SIGNALS,
            )


def _check_schedule(config: Config) -> None:
    """Each phase must end after it starts, as far as that is known without the data."""
    for i, phase in enumerate(config.lr.schedule):
        if phase.end is None:
            continue
        start, end = Duration.parse(phase.start), Duration.parse(phase.end)
        if start.unit == end.unit and end.value <= start.value:
            message = f"{phase.end!r} is not after its start {phase.start!r}."
            raise ConfigError(message, path=f"lr.schedule[{i}].end", value=phase.end)


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.mode != "auto" and checkpoint.best is None:
        message = f"{checkpoint.mode!r} says how to compare checkpoint.best, which is not set: "
        message += "set checkpoint.best=val_loss, for example."
        needs, mode = ["checkpoint.best"], checkpoint.mode
        raise ConfigError(message, path="checkpoint.mode", value=mode, needs=needs)
    if not checkpoint.resume.strip():
        message = "give auto, never, or the path of a checkpoint."
        raise ConfigError(message, path="checkpoint.resume", value=checkpoint.resume)
