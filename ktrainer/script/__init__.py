"""Keras scripts that have never heard of ktrainer, under `ktrainer run`.

    detection.py    whether a script is one of these, from its source
    imports.py      act right after numpy, TensorFlow or Keras was imported
    start.py        make the Trainer then, seed random numbers, and route
    routing.py      `Model.fit` and its like go through the Trainer
    batches.py      `train_on_batch` and its like
    files.py        files are written once
    stages.py       a model in stages is put together, to be cut again
    strategies.py   a strategy of the script's own
    loops.py        a custom loop that cannot be routed, named before it trains
    opened.py       a file that all ranks write, named
    replace.py      attributes that are replaced, and put back

A script that makes a Trainer of its own is left alone; so is all that follows in one that makes it
in another module.
"""
