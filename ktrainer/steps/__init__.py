"""A Keras model's train, test and predict step as compiled functions of one share of a batch.

The parts of this package:

    base.py                what a backend makes of a model: the interface
    options.py             how steps run, from the configuration
    program.py             a model's steps, compiled
    program_cache.py       a model's programs, kept until it is compiled again
    model_step.py          the model's own step, and what several ranks must do after it
    captured.py            an update of several shares: accumulation, XLA with several ranks
    multi.py               several updates in one call
    context.py             what a traced step must know of the other shares
    assertions.py          conditions that are known only when a step runs
    vector_losses.py       vectors over examples that a loss adds up
    all_gather.py          rows of all ranks in one tensor
    loss_scope.py          losses of the whole batch
    seams.py               the functions of Keras that are replaced while a step is traced
    guard.py               leaves out updates that would spoil a model
    logged.py              which logs are results of metrics, whatever they are called
    metric_states.py       whether the states of a metric add up over parts of the data
    optimizers.py          the optimizers that a model holds
    placement.py           where a model's variables are
    elsewhere.py           a variable that another stage of a pipeline holds
    strategy_scope.py      the strategy's scope that a call of the Trainer leaves meanwhile
    strategy_variables.py  a model's variables, taken out of a strategy
"""

from __future__ import annotations

from ktrainer.steps.base import Steps
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.options import Clip, StepOptions
from ktrainer.steps.program import Program

__all__ = ["Clip", "Program", "StepOptions", "Steps", "optimizers_of"]
