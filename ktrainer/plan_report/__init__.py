"""`ktrainer plan`: what a run would do, without running it or starting any other process.

planning_mode.py  whether this process only plans
report.py         what is printed
rendering.py      tables, sizes, schedules as text, SVG and PNG
"""
