"""A model cut into stages, each on a process of its own, fed with microbatches.

What each process does, and when, is pure data: `schedule.make_schedule` makes it, `simulate` says
how long it takes, `transfers` says what crosses between ranks, and `grid` prints it.
"""
