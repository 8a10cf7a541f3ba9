"""A schedule at run time.

runner.py                         runs this rank's actions in order
compiled_model.py                 the compiled stages of this process
transport.py, message_buffers.py  tensors between stages
tied_gradients.py                 gradients of variables that several stages hold
stage_update.py                   sums over replicas, clips, applies

Steps of a user's own, which run in every process:

model_call.py                     the call of a cut model, and its gradient
stage_runner.py                   this process's stage of it
stage_messages.py                 its messages, and sums over stages
global_norm.py                    norms over the gradients of all stages
stage_checks.py                   what such a step cannot do
"""
