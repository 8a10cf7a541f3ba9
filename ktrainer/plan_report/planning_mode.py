"""Whether this process only plans: set by `ktrainer plan`, read by the Trainer.

The ranks that `ktrainer plan --world` starts find its request in their environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from ktrainer.config import Config, PipelineConfig, TfDistributeConfig
from ktrainer.errors import ConfigError
from ktrainer.runtime.hardware import Hardware

VARIABLE = "KTRAINER_PLAN"


@dataclass(frozen=True)
class ScalingRequest:
    """The request of `ktrainer plan --world`.

    Attributes:
        worlds: numbers of processes to predict the step time of, in rising order; one number stands
            for it and smaller ones, which depend on the partitions of a pipeline.
        per_host: the most processes on a host.
        cores: of a host.
        threads: of a process.
        report: the file for what is to be printed.
        latency: seconds between hosts, per message; None: measured.
        bandwidth: bytes a second between hosts, each way; None: measured.
    """

    worlds: tuple[int, ...]
    per_host: int
    cores: int
    threads: int
    report: str
    latency: float | None = None
    bandwidth: float | None = None

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request of `ktrainer plan`.

    Attributes:
        processes: how many to plan for; None: one pipeline's, or one.
        picture: where to draw the schedule.
        trace: of a run, to which the planned timeline is added.
        scaling: predict the step time of several numbers of processes.
    """

    processes: int | None = None
    picture: Path | None = None
    trace: Path | None = None
    scaling: ScalingRequest | None = None


class PlanPrinted(SystemExit):
    """Ends the script once its plan is shown. No Exception: a script shall not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


_request: ContextVar[PlanRequest | None] = ContextVar("ktrainer_plan_request", default=None)


def plan_request() -> PlanRequest | None:
    """The request of `ktrainer plan`; None in a process that trains."""
    return _request.get() or _request_of(os.environ.get(VARIABLE))


@cache
def _request_of(given: str | None) -> PlanRequest | None:
    """The request in the environment of a rank."""
    if given is None:
        return None
    values = json.loads(given)
    scaling = ScalingRequest(**{**values, "worlds": tuple(values["worlds"])})
    return PlanRequest(scaling.worlds[-1], scaling=scaling)


def check_request(config: Config) -> None:
    """Refuse a picture or a trace of the schedule of what has none.

    Raises:
        ConfigError: the backend is no pipeline.
    """
    request = plan_request()
    if request is None or isinstance(config.backend, PipelineConfig):
        return
    for option, wanted in (("--picture", request.picture), ("--trace", request.trace)):
        if wanted is not None:
            raise ConfigError(
                f"{option} shows the schedule of a pipeline, and backend={config.backend.name} has "
                "none: add backend=pipeline, or leave the option out."
            )


@contextmanager
def planning_for(request: PlanRequest) -> Iterator[None]:
    """Plan inside the block, and do not train."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def pretend(config: Config, facts: Hardware) -> Hardware:
    """The facts to plan for: under `ktrainer plan` with as many processes as it asks for."""
    request = plan_request()
    if request is None:
        return facts
    backend = config.backend
    if isinstance(backend, TfDistributeConfig) and backend.strategy == "parameter_server":
        return replace(facts, workers=request.processes or facts.workers or 1)
    size = request.processes or (backend.partitions if isinstance(backend, PipelineConfig) else 1)
    on_host = size if request.scaling is None else min(size, request.scaling.per_host)
    return replace(facts, size=size, local_size=on_host, own_gpu=None)
