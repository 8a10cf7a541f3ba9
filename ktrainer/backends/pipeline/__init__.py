"""Pipeline parallelism: a model's graph cut into stages, and the schedules that run them.

backend      opens the groups of processes; `prepare` gives a PipelineProgram
planned      the model cut into stages, and the variables that this process keeps
program      train, test and predict: batches cut into microbatches, run by schedule
partition, schedule and what they use are pure: tested without processes
"""
