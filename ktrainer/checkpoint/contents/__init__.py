"""The contents of a checkpoint.

run_snapshot.py       takes a copy in memory of all that a checkpoint holds
capture_state.py      collects it; restore_state.py assigns it; validate_state.py checks it first
data_state.py, metric_state.py, local_state.py, powersgd_state.py   parts of it
callback_state.py, plain_attributes.py   states of callbacks; of those without `state_dict`
unsaved_variables.py  warns of what is not in it
"""
