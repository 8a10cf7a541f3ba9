"""Pipeline schedules as pure data: actions in order for each rank.

make_schedule.py               the entry: a schedule by name, checked
schedule_functions.py          the schedules, a function each; list_scheduling.py: by priorities
actions.py                     actions and `Schedule`; transfers.py: the messages between them
timeline.py, schedule_text.py  when each action runs; drawn as text
"""
