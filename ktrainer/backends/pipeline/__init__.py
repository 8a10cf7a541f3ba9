"""Pipeline parallelism: a model's graph cut into stages, and the schedules that run them.

| where | what is in it | step below |
|---|---|---|
| backend.py | process groups; `prepare` gives the program of a model | |
| program.py | train, test and predict | 1 |
| own_step_program.py | a model's own `train_step`, in every process of a replica | |
| check_supported.py | refuses models and callbacks that a pipeline does not support | |
| planning.py | from model and config to stages and schedule | |
| planned_model.py | the model cut into stages, and this process's partition of it | |
| gather_stages.py | makes a cut model whole again, in every process | |
| schedules/ | pure data: actions in order for each rank, their timeline, as text | |
| graph/ | a Keras model traced into its graph of layers and ops | |
| partition/ | the graph cut into stages: costs, search for balanced cuts, stages by hand | |
| placement/ | which process holds which variables and averages of weights | |
| stage/ | one stage compiled: forward and backward, loss, sums of gradients | 3 |
| runtime/ | the runner of a schedule, transport between stages, weight update | 2, 4, 5 |

The way of a batch:

1. `program.py` cuts a local batch into microbatches (`stage/microbatches.py`).
2. `runtime/runner.py` runs this rank's actions in the order of its schedule; `runtime/transport.py`
   receives what an action needs and sends what it made (`schedules/transfers.py` says which).
3. `stage/compiled_stage.py` computes an action. On the last stage `stage/loss_head.py`
   computes loss and metrics, or `stage/global_loss.py` those of the whole batch. Gradients are
   added up in `stage/gradient_accumulators.py`.
4. `runtime/tied_gradients.py` sums gradients of weights that several stages hold;
   `runtime/stage_update.py` sums all of them over replicas, clips and applies them.
5. Logs of the last stage are broadcast to all stages.

A *partition* is the set of stages that one process holds; `partition(i)` puts layers into stage i.

Imports run one way: graph, schedules < partition < stage < planning, placement < planned_model <
runtime < program, own_step_program, gather_stages < backend.
"""
