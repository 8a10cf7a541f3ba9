"""Keras scripts that make no Trainer, under `ktrainer run`.

    plain_script          recognises such a script by its source
    bootstrap             makes the Trainer when Keras is imported, seeds random numbers, and routes
    routing               sends `Model.fit` and other methods through the Trainer
    batch_methods         `train_on_batch` and its siblings
    keras_callbacks       adapts callbacks to several ranks
    shared_files          writes files of Keras once
    shared_folders        makes folders once
    user_strategies       replaces a strategy of the script
    unsupported_patterns  detects custom loops, and files that every rank writes

A script that makes its own Trainer is not routed; if it does so in another module, routing ends
there.
"""
