"""Whether this process only plans: set by `ktrainer plan`, read by the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from ktrainer.config import Config, PipelineConfig, TfDistributeConfig
from ktrainer.runtime.hardware import Hardware


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request of `ktrainer plan`.

    Attributes:
        processes: how many to plan for; None: one pipeline's, or one.
        picture: where to draw the schedule.
    """

    processes: int | None = None
    picture: Path | None = None


class PlanPrinted(BaseException):
    """Ends the script once its plan is shown. No Exception: a script shall not catch it."""


_request: ContextVar[PlanRequest | None] = ContextVar("ktrainer_plan_request", default=None)


def plan_request() -> PlanRequest | None:
    """The request of `ktrainer plan`; None in a process that trains."""
    return _request.get()


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
    return replace(facts, size=size, local_size=size, own_gpu=None)
