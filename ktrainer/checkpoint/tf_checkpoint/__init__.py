"""Checkpoints of `tf.train.Checkpoint`, as Keras 2 and Horovod scripts wrote them.

object_graph.py        reads the file: objects, variables, slots
match_weights.py       which of its variables is which weight of a Keras 3 model
match_optimizer.py     the same for optimizers
import_checkpoint.py   writes a ktrainer checkpoint of what matched, or a table of what did not
"""
