"""TensorFlow's own strategies, with the numbers of one process.

The parts of this package:

    backend.py      puts the others together
    strategies.py   a strategy from the configuration
    clusters.py     which processes are a cluster: TF_CONFIG, Slurm, or the ranks of MPI
    loopback.py     TensorFlow's server, kept off other interfaces where all is on one host
    lost.py         what TensorFlow says when a process has gone, as errors that name it
    moving.py       a model's variables into a strategy
    program.py      a model's steps: split, run, put together
    replicas.py     one step on all replicas of this process
    parts.py        each replica's part of a batch, and its way there
    scopes.py       what each replica's thread has of its own meanwhile
    plane.py        sums over replicas, from inside a step
    outputs.py      one set of logs, one batch of outputs, from those of the replicas
    accumulate.py   updates from several shares, or compiled with XLA
    custom.py       the same for loops of the user's own

    serving.py      with parameter servers: the processes that serve
    presence.py     who of them is there, as the coordinator sees it
    workers.py      how the coordinator has workers run functions, and waits for them
    coordinator.py  a model's steps, run by workers
    sharded.py      variables that are cut between servers
"""

from __future__ import annotations
