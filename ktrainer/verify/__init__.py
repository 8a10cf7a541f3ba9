"""Compare split with unsplit training: `health.verify` and `ktrainer verify`.

first_update_check.py   `health.verify`: the check that `fit` makes before its first update
eager_pass.py           one pass of a model's `train_step` without side effects: loss and gradients
side_effects.py         undoes other changes that a pass makes
gradient_compare.py     gradients of a whole batch against those of its parts
metric_compare.py       compiled metrics, likewise
known_differences.py    what a run says cannot equal one process
diagnosis.py            likely cause of a difference, and the remedy; rounding tolerances
verify_mode.py          whether `ktrainer verify` runs this process, and its configuration then
update_recorder.py      records the first updates of such a run
compare_runs.py         compares two recorded runs; the printed table
update_split.py         how many parts an update is split into
batch_invariant_random.py   random numbers that are the same for every example of any batch

The command itself is `ktrainer.cli.verify_command`.
"""
