"""Rows of logs in experiment trackers: Weights & Biases, MLflow, Trackio.

    history.jsonl -> final_rows.py: rows that will not be trained again -> sender.py, a thread
        -> a `TrackerRun` (tracker_run.py): wandb_run.py, mlflow_run.py,
        trackio_run.py

A tracker cannot take back what it was sent. So it is sent a row once a checkpoint of a later step
is on the disk, from which training would resume; a row that is trained again is sent once. Without
checkpoints, a row is sent when the next one is there.

The callback, `tracker.py`, only wakes the thread.
"""
