"""A schedule at run time.

runner.py                         runs this rank's actions in order
compiled_model.py                 the compiled stages of this process
transport.py, message_buffers.py  tensors between stages
tied_gradients.py                 gradients of variables that several stages hold
stage_update.py                   sums over replicas, clips, applies

Steps of a user's own, which run in every process:

model_call.py                     the call of a cut model, and its gradient
stage_runner.py                   this process's stage of it
sums_over_stages.py, global_norm.py   what depends on the gradients of several stages
stage_checks.py                   what such a step cannot do
"""
