"""`ktrainer plan`: what a run would do, without running it or starting any other process.

The command, which runs a script up to `fit` or takes a configuration alone, is `launch/plan.py`.

mode.py      whether this process only plans
backend.py   the backend of such a process
report.py    what is printed
text.py      tables, sizes and grids; picture.py: a schedule as PNG or SVG
"""
