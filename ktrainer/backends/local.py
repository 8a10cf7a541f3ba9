"""One process: the reference that every other backend must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktrainer.backends.backend import Backend
from ktrainer.backends.user_loop import UserLoop
from ktrainer.steps import CompiledProgram, Program, StepOptions
from ktrainer.steps.move_out_of_strategy import unwrap_variables

if TYPE_CHECKING:
    import keras


class Local(Backend):
    """Runs the model's own steps, compiled, in this process."""

    name = "local"

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        unwrap_variables(model)  # of a strategy of the user's own
        return CompiledProgram(model, options)

    def open_loop(self) -> UserLoop:
        return UserLoop(self.world)
