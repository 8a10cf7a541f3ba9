"""Training with parameter servers.

coordinator.py        a step: workers compute, servers store
worker_pool.py        the workers, which run functions for the coordinator, or a user's own steps
cluster_task.py       a worker's or a server's process: it serves until the coordinator ends
liveness.py           which processes are lost, or stopped
sharded_variables.py  variables that are split over servers, or that workers add to
"""
