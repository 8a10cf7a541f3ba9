"""The `ktrainer` command.

main.py picks the sub-command, each of which is in its `*_command.py`; launch_options.py,
launch_config.py and launch_hosts.py: options of `ktrainer run`, the keys that it must know before
it starts ranks, and their hosts; prepare_launch.py derives from these how ranks are started.
"""
