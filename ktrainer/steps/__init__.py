"""A Keras model's train, test and predict step as compiled functions of one local batch.

compiled_program.py, program_interface.py, program_cache.py   the program of a model, and its reuse
compiled_step.py                                   a tf.function that is traced once
keras_patches.py, step_context.py                  how Keras' step is traced as a part of an update
inner_functions.py                                 a tf.function that a step calls
step_helpers.py                                    a batch's rows, averaged statistics, a check
update_in_parts.py, accumulated_update.py          accumulation: the algorithm; on one rank
loss_denominators.py                               by what losses of several ranks are divided
loss_scope.py, all_gather.py, unreduced_losses.py     losses over the examples of several ranks
random_numbers.py                                  draws that differ between ranks
clipped_gradients.py, gradient_flow.py             gradients that a step clips itself, or changes
reduce_gradients.py, embedding_gradients.py        the sum of gradients over ranks; of embeddings
powersgd.py, sent_bytes.py                         gradients sent as products of thin matrices; how
                                                   many bytes are sent
update_guard.py                                    skips updates that would spoil the model
metric_logs.py                                     logs that are results of metrics
mean_metrics.py                                    the weight of a rank's numbers in a mean
metric_states.py, metric_reduction.py              states that add up; their sums over ranks
named_variables.py                                 the variables of a model's state, by unique names
variable_placement.py, remote_variable.py          variables that other processes hold
local_layers.py                                    variables that are each rank's own
loop_step.py, assigned_variables.py                a step of a loop of the user's own, on one rank
variable_assignments.py                            how a traced step assigns to variables
variable_broadcast.py                              equal variables on all ranks
strategy_scope.py, move_out_of_strategy.py           leaving a tf.distribute strategy
step_options.py, train_many.py, optimizers.py, assertions.py   small parts

The way of a batch under data_parallel: `training/loop.py` takes it from a feed
(`data/indexed_feed.py`); `compiled_program.py` runs the traced `train_step`, in which
`keras_patches.py` replaces the functions that divide losses and apply the optimizer;
`step_context.py` has the denominators and reduces the gradients, by way of `reduce_gradients.py`,
through `distributed/collectives.py`, which `distributed/mpi_gradients.py` implements.
"""

from __future__ import annotations

from ktrainer.steps.compiled_program import CompiledProgram
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.program_interface import Program
from ktrainer.steps.step_options import Clip, StepOptions

__all__ = ["Clip", "CompiledProgram", "Program", "StepOptions", "optimizers_of"]
