"""Training with parameter servers.

coordinator.py        a step: workers compute, servers store
worker_loop.py        the steps of a loop of the user's own
worker_pool.py        the workers, which run functions for the coordinator
cluster_task.py       a worker's or a server's process: it serves until the coordinator ends
liveness.py           which processes are lost, or stopped
sharded_variables.py  variables that are split over servers
"""
