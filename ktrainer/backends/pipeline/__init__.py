"""Pipeline parallelism: a model's graph cut into stages, and the schedules that run them."""
