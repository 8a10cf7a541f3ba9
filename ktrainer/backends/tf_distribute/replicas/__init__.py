"""A step on the replicas of one process.

replica_step.py          Keras' step on every replica, with common denominators and sums
replica_loop.py          the step of a loop of the user's own on every replica
replica_accumulation.py  the same with accumulation, or with XLA
replica_batches.py       a batch as one slice for each replica
replica_metrics.py       metrics of a step that is traced on replicas
replica_scopes.py        state of each replica's thread while a step is traced
replica_collectives.py   sums over replicas
merge_outputs.py         merges the results of the replicas
"""
