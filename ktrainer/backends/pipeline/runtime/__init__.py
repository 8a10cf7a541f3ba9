"""A schedule at run time.

runner.py                         runs this rank's actions in order
compiled_model.py                 the compiled stages of this process
transport.py, message_buffers.py  tensors between stages
tied_gradients.py                 gradients of variables that several stages hold
stage_update.py                   sums over replicas, clips, applies
"""
