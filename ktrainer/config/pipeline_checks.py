"""Check the keys of a pipeline together, and parse them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.config import callback_registry
from ktrainer.config.backend_keys import PipelineConfig
from ktrainer.config.name_patterns import compile_pattern
from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.config.schema import Config

# Callbacks that restore the weights of a whole model, which no rank of a pipeline has.
_WHOLE_MODEL = ("backup_and_restore",)

_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)\s*")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def check_pipeline(config: Config, backend: PipelineConfig) -> None:
    """Refuse keys of the pipeline that cannot work, alone or together.

    Raises:
        ConfigError: for the first one found, with the nearest value that works.
    """
    backend = effective_pipeline(config, backend)
    make_schedule(
        backend.schedule,
        backend.partitions,
        backend.microbatches * config.trainer.accumulate,
        backend.chunks,
        backend.active_microbatches,
    )
    memory_limit(backend)
    _check_stages(backend)
    _check_callbacks(config)
    if config.trainer.asks_for_several_steps:
        raise ConfigError(
            f"{config.trainer.steps_per_call} is impossible with backend=pipeline, whose step is "
            "not one compiled function but many, with messages between them: set it to 1.",
            path="trainer.steps_per_call",
            value=config.trainer.steps_per_call,
        )


def effective_pipeline(config: Config, backend: PipelineConfig) -> PipelineConfig:
    """The pipeline's keys as they are run: `trainer.loss_scope=global` turns 1f1b, which is the
    default, into gpipe, since the loss of a whole batch needs all forward passes first.

    Raises:
        ConfigError: another schedule, or several chunks, with `trainer.loss_scope=global`.
    """
    if config.trainer.loss_scope == "local":
        return backend
    if backend.schedule not in ("1f1b", "gpipe"):
        raise ConfigError(
            f"{backend.schedule} begins backward passes before the last forward pass, but "
            "trainer.loss_scope=global computes the loss on all microbatches at once: use "
            "backend.schedule=gpipe, or trainer.loss_scope=local.",
            path="backend.schedule",
            value=backend.schedule,
        )
    if backend.chunks > 1:
        raise ConfigError(
            f"gpipe has one chunk a process here, not {backend.chunks}, and "
            "trainer.loss_scope=global needs gpipe: use backend.chunks=1.",
            path="backend.chunks",
            value=backend.chunks,
        )
    return replace(backend, schedule="gpipe")


def memory_limit(backend: PipelineConfig) -> int | None:
    """`backend.memory_limit` in bytes: "2GB" is 2,000,000,000, "2GiB" 2,147,483,648.

    Raises:
        ConfigError: it is no size.
    """
    text = backend.memory_limit
    if text is None:
        return None
    match = _BYTES.fullmatch(text)
    size = 0
    if match and (match[2] or not match[3]):
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
    if size < 1:
        message = f'{text!r} is no size: give bytes, or a number with a unit, such as "2GB".'
        raise ConfigError(message, path="backend.memory_limit", value=text)
    return size


def stage_patterns(backend: PipelineConfig) -> dict[int, str]:
    """`backend.stages` by number."""
    return {int(stage): pattern for stage, pattern in backend.stages.items()}


def _check_stages(backend: PipelineConfig) -> None:
    count = backend.partitions * backend.chunks
    numbers = f"stages are numbered from 0 to {count - 1}"
    of_count = ("backend.partitions", "backend.chunks")
    for stage, pattern in backend.stages.items():
        path = f"backend.stages.{stage}"
        if not stage.isdecimal() or int(stage) >= count:
            message = f"there is no stage {stage}: {numbers} (partitions x chunks - 1)."
            needs = of_count if stage.isdecimal() else ()
            raise ConfigError(message, path=path, value=pattern, needs=needs)
        compile_pattern(pattern, path)
    left = [stage for stage in range(count) if str(stage) not in backend.stages]
    if backend.stages and left and backend.default_partition not in left:
        raise ConfigError(
            f"stage {left[0]} has no pattern; {numbers}. Give it one, or set "
            f"backend.partitions={max(1, len(backend.stages) // backend.chunks)}.",
            path="backend.stages",
            value=dict(backend.stages),
            needs=[f"backend.stages.{left[0]}"],
        )
    if backend.default_partition is not None and backend.default_partition >= count:
        message = f"there is no stage {backend.default_partition}: {numbers}."
        path, value = "backend.default_partition", backend.default_partition
        raise ConfigError(message, path=path, value=value, needs=of_count)


def _check_callbacks(config: Config) -> None:
    """Refuse Keras' callbacks that need every weight in one process."""
    for name, spec in config.callbacks.items():
        kind = next((kind for kind in _WHOLE_MODEL if callback_registry.is_type(spec, kind)), None)
        if kind is not None:
            raise ConfigError(
                f"{kind} needs the weights of the whole model, which no rank of a pipeline has: "
                "use checkpoint.every, checkpoint.best, or trainer.save(NAME.keras) in the script.",
                path=f"callbacks.{name}.type",
                value=kind,
            )
