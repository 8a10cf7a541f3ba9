"""Plans: a configuration and hardware facts become a layout of the run, or an error.

run_plan.py            `make_plan`: processes, devices and batches of any run
strategy_plan.py       devices and processes of a `tf.distribute` strategy
communication_cost.py  time that collectives take, from latency and bandwidth
"""
