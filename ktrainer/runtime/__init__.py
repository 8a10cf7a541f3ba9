"""The environment of this process: hardware, TensorFlow, Keras, folders.

hardware.py, devices.py  the hardware that is present; TensorFlow's devices
tensorflow_setup.py      TensorFlow's threads and memory; tensorflow_logging.py: its log lines
autograph.py             what TensorFlow's AutoGraph rewrites of ours, and of a user's
run_folder.py            the folder of a run; folder_lock.py: one job at a time in it
private_file.py          files for their owner alone
history_file.py          the format of a run's record; code_version.py: the script's, by git
keras_symbols.py         every private symbol of Keras and TensorFlow that ktrainer relies on
symbol_check.py          compares them with the installed versions at start
monkeypatching.py        temporarily replaces attributes of other packages
garbage_collection.py    pauses Python's while modules are imported, and may leave these out of it
"""
