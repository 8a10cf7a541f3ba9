"""Whether this process only plans: set by `ktrainer plan`, looked at by the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from ktrainer.config import Config, PipelineConfig, TfDistributeConfig
from ktrainer.facts import WorldFacts


@dataclass(frozen=True, slots=True)
class Preview:
    """What `ktrainer plan` was asked for.

    Attributes:
        processes: how many to plan for; None: one pipeline's, or one.
        picture: where to draw the schedule.
    """

    processes: int | None = None
    picture: Path | None = None


class Previewed(BaseException):
    """Ends the script once its plan is shown. No Exception: a script shall not catch it."""


_asked: ContextVar[Preview | None] = ContextVar("ktrainer_preview", default=None)


def asked() -> Preview | None:
    """What `ktrainer plan` was asked for; None in a process that trains."""
    return _asked.get()


@contextmanager
def previewing(preview: Preview) -> Iterator[None]:
    """Plan inside the block, and do not train."""
    token = _asked.set(preview)
    try:
        yield
    finally:
        _asked.reset(token)


def pretend(config: Config, facts: WorldFacts) -> WorldFacts:
    """The facts to plan for: in a preview as many processes on this node as asked for."""
    preview = asked()
    if preview is None:
        return facts
    backend = config.backend
    if isinstance(backend, TfDistributeConfig) and backend.strategy == "parameter_server":
        return replace(facts, workers=preview.processes or facts.workers or 1)
    size = preview.processes or (backend.partitions if isinstance(backend, PipelineConfig) else 1)
    return replace(facts, size=size, local_size=size, own_gpu=None)
