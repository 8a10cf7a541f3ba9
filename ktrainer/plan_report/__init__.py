"""`ktrainer plan`: what a run would do, without running it.

planning_mode.py           whether this process only plans
report.py                  what is printed
rendering.py               tables, sizes, schedules as text, SVG and PNG
scaling_report.py          `--world`: the step time of other numbers of processes
scaling_predictions.py     their steps, predicted from steps that are measured
scaling_model.py           the step of data-parallel processes, from that of one
pipeline_scaling_model.py  the step of a pipeline, from its stages
scaling_measurement.py     steps of one process, and their collectives
scaling_stages.py          the stages of a pipeline, in one process
network_measurement.py     latency and bandwidth between ranks
"""
