"""A graph cut into stages.

balance.py        the entry: the search for stages of equal cost; optimal_cuts.py: its algorithm
manual_stages.py  stages set by the user
costs.py, flops.py, partition_inputs.py   what each node costs
stage_assignment.py   the stages, and the table that shows them
stage_graphs.py   what each stage computes, receives and sends
"""
