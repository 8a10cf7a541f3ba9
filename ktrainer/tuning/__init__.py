"""Searching for settings: the learning-rate range test of `ktrainer lr-find`.

range_test_mode.py      whether `ktrainer lr-find` runs this process, and its configuration then
learning_rate_range.py  the callback that raises the rate and keeps the losses
rate_suggestion.py      the curve, the rate that it suggests, and its picture
"""
