"""Records of runs in their folders, read without TensorFlow.

run_record.py        one run: its state, its best values, how to resume it; the runs in a folder
run_differences.py   two runs: where their values differ first, and what else differs
weight_digests.py    several runs: whether their weights after the same step differ
run_curves.py        the rows of a run by metric, thinned out for drawing
run_marks.py         what happened in a run by the clock, and what of it stood out
report_page.py       the page of `ktrainer report`: report_data.py has what report.js and
                     report_charts.js draw, report_tables.py the rest; report_picture.py: a PNG
report_schedule.py   what a pipeline's stages did when, by a trace; report_schedule.js draws it
sweep_page.py        the page of `ktrainer sweep`, with what sweep.js draws
sweep_summary.py     the best trial of a sweep, which `ktrainer runs` names
html_page.py         what is around the contents of a page
live_record.py       a record that is read on as it grows; live_view.py: what `ktrainer watch` shows
"""
