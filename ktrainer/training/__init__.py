"""One run: its data, callbacks and program, the nested loops, evaluation and resume.

run.py opens, loop.py trains, evaluation.py evaluates and predicts
call_arguments.py, keras_limits.py, fit_settings.py, triggers.py, context.py, default_callbacks.py:
parts of a call
stop_decision.py: when training stops; slow_watch.py: what is slow
updates_per_call.py: how many updates one call of the compiled step makes
custom_loop.py: the Trainer's face for loops of the user's own; user_steps.py, loop_state.py: their
run by `trainer.steps`
history_log.py, run_facts.py: the record of the run
resume.py, roll_back.py: checkpoints at the start, and later; recovery_protocol.py: lost ranks;
preemption.py: signals
"""
