"""The configuration that `init` takes: its keys, their defaults, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ktrainer.errors import ConfigError

_ALIASES = {"pipeline_parallel_degree": "partitions"}
_CHOICES = {
    "pipeline": ("interleaved", "simple", "_only_forward"),
    "optimize": ("memory", "speed"),
    "placement_strategy": ("cluster", "spread"),
}
_FLAGS = ("auto_partition", "contiguous", "horovod")
_COUNTS = ("partitions", "microbatches", "active_microbatches")


@dataclass(frozen=True)
class Settings:
    """The keys of `init(config)`, checked; the names are those of SageMaker's library.

    Attributes:
        partitions: stages of a model, each in a process; also `pipeline_parallel_degree`.
        microbatches: parts of a batch that follow one another through the stages.
        pipeline: the schedule: `interleaved` runs backward passes as soon as they can, `simple`
            all forward passes first, `_only_forward` no backward passes.
        optimize: what stages are balanced by: bytes of variables, or time.
        auto_partition: whether layers are put on stages automatically; then `partition` is ignored.
        default_partition: the stage of layers outside of any `partition`.
        contiguous: whether each automatic stage must be a connected part of the model. It is one
            with False, too, which allows others but asks for none.
        placement_strategy: whether the stages of a model (`cluster`) or the copies of a stage
            (`spread`) are on neighbouring ranks.
        horovod: whether `ktrainer.dataparallel` acts over the replicas of a stage.
        active_microbatches: how many may be on their way; None: `partitions + 2`.
        memory_weight: 0 to balance time alone, 1 for memory; None: 0.2 for speed, else 0.8.
    """

    partitions: int
    microbatches: int = 1
    pipeline: str = "interleaved"
    optimize: Literal["memory", "speed"] = "memory"
    auto_partition: bool = True
    default_partition: int | None = 0
    contiguous: bool = True
    placement_strategy: Literal["cluster", "spread"] = "cluster"
    horovod: bool = False
    active_microbatches: int | None = None
    memory_weight: float | None = None

    def __post_init__(self) -> None:
        if self.active_microbatches is None:
            object.__setattr__(self, "active_microbatches", self.partitions + 2)
        if self.memory_weight is None:
            object.__setattr__(self, "memory_weight", 0.2 if self.optimize == "speed" else 0.8)


def settings_of(config: Mapping[str, Any] | None, size: int) -> Settings:
    """The settings in a script's dictionary, for `size` processes.

    Raises:
        ConfigError: a key is unknown, a value is none of its values, or the processes cannot be
            divided into replicas of as many stages.
    """
    given = _named(dict(config or {}))
    if "partitions" not in given:
        raise ConfigError(
            "smp.init needs the number of stages that a model is cut into: "
            'smp.init({"partitions": 2, "microbatches": 4})'
        )
    _check_values(given)
    partitions = given["partitions"]
    _check_partitions(given, partitions)
    if size % partitions:
        raise ConfigError(
            f"{size} processes cannot hold replicas of {partitions} stages each: start a multiple "
            f"of {partitions} (ktrainer run -n {partitions} SCRIPT), or use as many partitions as "
            f"divide {size}",
            path="partitions",
        )
    return Settings(**given)


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """The same under the names of `Settings`, which has all of them."""
    known = [each.name for each in fields(Settings)]
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = _ALIASES.get(key, key)
        if name not in known:
            raise ConfigError(
                f"smp.init has no key {key!r}; its keys are {', '.join([*known, *_ALIASES])}.",
                path=str(key),
                known=[*known, *_ALIASES],
            )
        if name in found and found[name] != value:
            raise ConfigError(
                f"'partitions' and 'pipeline_parallel_degree' are one key, given as "
                f"{found[name]!r} and {value!r}: leave one of them out",
                path="partitions",
            )
        found[name] = value
    return found


def _check_values(given: Mapping[str, Any]) -> None:
    for name in _FLAGS:
        if name in given and not isinstance(given[name], bool):
            raise ConfigError(f"is True or False, not {given[name]!r}", path=name)
    for name in _COUNTS:
        if name not in given or (name == "active_microbatches" and given[name] is None):
            continue
        if not _is_integer(given[name]) or given[name] < 1:
            raise ConfigError(f"is an integer of 1 or more, not {given[name]!r}", path=name)
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise ConfigError(
                f"is one of {', '.join(choices)}, not {given[name]!r}.",
                path=name,
                value=given[name],
                known=choices,
            )
    weight = given.get("memory_weight")
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 <= weight <= 1):
        raise ConfigError(f"is a number from 0 to 1, not {weight!r}", path="memory_weight")


def _check_partitions(given: Mapping[str, Any], partitions: int) -> None:
    default = given.get("default_partition")
    if not given.get("auto_partition", True) and default is None:
        raise ConfigError(
            "is needed with auto_partition=False: the stage of layers outside of every "
            "smp.partition, such as 0",
            path="default_partition",
        )
    if default is not None and not (_is_integer(default) and 0 <= default < partitions):
        raise ConfigError(
            f"is a stage, an integer from 0 to {partitions - 1}, not {default!r}",
            path="default_partition",
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
