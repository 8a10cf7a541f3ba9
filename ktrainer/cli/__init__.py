"""The `ktrainer` command.

main.py picks the sub-command, each of which is in its `*_command.py`; launch_options.py and
launch_config.py: options of `ktrainer run`, and the keys that it must know before it starts ranks.
"""
