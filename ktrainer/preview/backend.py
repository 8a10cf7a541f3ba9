"""The backend of a process that only plans: it is one process, whatever it plans for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktrainer.backends.local import Local


class Planning(Local):
    """Makes the model, as the backend that it plans for would, and never trains it."""

    def build_model(self, build: Callable[[], Any]) -> Any:
        if self.plan.backend != "pipeline":
            return super().build_model(build)
        from ktrainer.backends.pipeline.deferred import build_deferred

        # No weights: a model for a pipeline may be too large for one process.
        return build_deferred(build)
