"""Pipeline parallelism: a model's graph cut into stages, and the schedules that run them.

The parts are here, tested and pure; the backend that runs them is not part of this version.
"""
