"""Searching for settings: the learning-rate range test of `ktrainer lr-find`, and `ktrainer sweep`.

range_test_mode.py      whether `ktrainer lr-find` runs this process, and its configuration then
learning_rate_range.py  the callback that raises the rate and keeps the losses
rate_suggestion.py      the curve, the rate that it suggests, and its picture
search_space.py         the values that the words of a sweep name for a key
sweep_study.py          the study in Optuna: which trial is next, and what came of each
sweep_trial.py          whether `ktrainer sweep` runs this process, and its configuration then
sweep_reports.py        the callback that reports to the study, and stops a pruned trial
"""
