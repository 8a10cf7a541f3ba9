"""Checkpoints on disk.

checkpoint_store.py   the folder of a run's checkpoints: list, keep, remove
checkpoint_folder.py  one checkpoint, which a rename makes visible when it is complete
checkpoint_reader.py  reads and verifies one
find_checkpoints.py   the checkpoint that a path or a run's name means
safetensors_file.py   tensors in a file, read as memory maps
value_encoding.py     everything else, as JSON
"""
