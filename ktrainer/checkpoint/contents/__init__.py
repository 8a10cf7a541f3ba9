"""The contents of a checkpoint.

run_snapshot.py     takes a copy in memory of all that a checkpoint holds
capture_state.py    collects it; restore_state.py assigns it; validate_state.py checks it first
data_state.py, metric_state.py, callback_state.py, local_state.py, powersgd_state.py
                    parts of it
"""
