"""`ktrainer plan`: what a run would do, without running it.

planning_mode.py        whether this process only plans
report.py               what is printed
rendering.py            tables, sizes, schedules as text, SVG and PNG
scaling_report.py       `--world`: the step time of other numbers of processes
scaling_model.py        their steps, predicted from measured ones
scaling_measurement.py  steps of one process, and their collectives
scaling_stages.py       the stages of a pipeline, in one process
network_measurement.py  latency and bandwidth between ranks
"""
