"""Does a model train the same in parts as at once?

first_step.py   `health.verify`: the check that `fit` makes before its first update
passes.py       one pass of a model's `train_step` that leaves nothing behind: loss and gradients
side_effects.py what else a pass changes, undone
compare.py      gradients at once beside those in parts; the likely cause of a difference
mode.py         whether `ktrainer verify` runs this process, and how it is then configured
recorder.py     records the first updates of such a run
split.py        into how many parts an update is split
diagnosis.py    why an update in parts differs, and what to do; how far rounding reaches
table.py        two recorded runs, item by item, and why they differ
batch_invariant_random.py   random numbers that are the same for every example of any batch

The command itself is `ktrainer.launch.verify`.
"""
