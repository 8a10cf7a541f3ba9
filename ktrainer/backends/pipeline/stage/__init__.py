"""One stage, compiled: forward, backward, loss and sums of gradients.

compiled_stage.py    the passes of a stage for microbatches of one shape
stage_functions.py, subgraphs.py, stage_settings.py   how they are cut out of a traced step
loss_head.py, global_loss.py   the last stage's loss and metrics; `trainer.loss_scope=global`
microbatches.py      a batch cut into microbatches, with their weights
gradient_accumulators.py, gradient_ordering.py  sums over microbatches; one large gradient at a time
py_functions.py, tensor_memory.py   `tf.py_function`; addresses of tensors
"""
