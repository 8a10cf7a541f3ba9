"""Placement: the processes that hold each variable.

deferred_variables.py  builds a model without values, then makes those that this process holds
variable_holders.py    holders of each variable; moving_averages.py: `use_ema`
"""
