"""One process: the reference that every other backend must equal; and one that only plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktrainer.backends.backend import Backend
from ktrainer.backends.user_loop import UserLoop
from ktrainer.steps import CompiledProgram, Program, StepOptions
from ktrainer.steps.move_out_of_strategy import unwrap_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras


class Local(Backend):
    """Runs the model's own steps, compiled, in this process."""

    name = "local"

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        unwrap_variables(model)  # of a strategy of the user's own
        return CompiledProgram(model, options)

    def open_loop(self) -> UserLoop:
        return UserLoop(self.world)


class PlanOnly(Local):
    """Makes models as the backend that it plans for would, and never trains them."""

    def build_model(self, build: Callable[[], Any]) -> Any:
        if self.plan.backend != "pipeline":
            return super().build_model(build)
        from ktrainer.backends.pipeline.placement.deferred_variables import build_deferred

        # No weights: a model for a pipeline may be too large for one process.
        return build_deferred(build)
