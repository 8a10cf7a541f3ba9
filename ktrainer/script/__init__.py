"""Keras scripts that make no Trainer, under `ktrainer run`.

    detection.py    whether a script is one of these, from its source
    bootstrap.py    once Keras is imported, make the Trainer, seed random numbers, and route
    routing.py      `Model.fit` and its like go through the Trainer
    callbacks.py    callbacks of several ranks: files are written once, and all decide alike
    batches.py      `train_on_batch` and its like
    files.py        files are written once
    stages.py       a model in stages is put together, to be cut again
    strategies.py   a strategy of the script's own
    diagnostics.py  custom loops and files of all ranks, which are not shared out, are named
    replace.py      attributes that are replaced, and put back

A script that makes a Trainer of its own is left alone; so is all that follows in one that makes it
in another module.
"""
