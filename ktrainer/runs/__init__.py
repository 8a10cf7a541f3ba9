"""What is known of runs, from the records in their folders; without TensorFlow.

run_record.py        one run: its state, its best values, how to resume it; the runs in a folder
run_differences.py   two runs: where their values differ first, and what else differs
"""
