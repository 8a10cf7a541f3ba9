"""A Keras model's train, test and predict step as compiled functions of one share of a batch."""

from __future__ import annotations

from ktrainer.steps.base import Steps
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.options import Clip, StepOptions
from ktrainer.steps.program import Program

__all__ = ["Clip", "Program", "StepOptions", "Steps", "optimizers_of"]
