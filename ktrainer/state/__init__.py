"""The state of a run.

train_state.py    all state of a run: model, program, feeds, progress, requests to stop
progress.py       counters of epochs, steps and examples
durations.py      "1ep", "500ba", "10m", and the trigger `Every`
metric_counts.py  number of examples that a rank's metrics have counted
nested_logs.py    nested logs, flattened
warning_log.py    warnings of this process, on their way to the screen
"""
