"""TensorFlow's own strategies, with the numbers of one process.

backend.py             makes the strategy and its programs; strategies.py: by name
program.py             train, test and predict on the replicas of a strategy
replicas/              one step on the replicas of this process
parameter_server/      training with parameter servers
clusters.py            addresses of all ranks; server_interface.py: on one interface
lost_process.py        names the process of a cluster that was lost
move_into_strategy.py  moves a model's variables into the strategy
"""

from __future__ import annotations
