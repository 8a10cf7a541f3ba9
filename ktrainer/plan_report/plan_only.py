"""The backend of a process that only plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktrainer.backends.local import Local

if TYPE_CHECKING:
    from collections.abc import Callable


class PlanOnly(Local):
    """Makes models as the backend that it plans for would, and never trains them."""

    def build_model(self, build: Callable[[], Any]) -> Any:
        if self.plan.backend != "pipeline":
            return super().build_model(build)
        from ktrainer.backends.pipeline.placement.deferred_variables import build_deferred

        # No weights: a model for a pipeline may be too large for one process.
        return build_deferred(build)
