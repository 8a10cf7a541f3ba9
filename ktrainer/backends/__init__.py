"""Backends, the ways to run a step. Each is one class, and one line in the table below.

backend.py        the interface of all
local.py          one process
data_parallel.py  each process has the whole model and trains on its rows of every batch
pipeline/         each process has stages of the model
tf_distribute/    TensorFlow's strategies
user_loop.py      loops of the user's own in one process; rank_loop.py: on several ranks
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktrainer.backends.backend import Backend
    from ktrainer.config import Config
    from ktrainer.distributed import World
    from ktrainer.plan.run_plan import Plan

BACKENDS = {
    "local": "ktrainer.backends.local:Local",
    "data_parallel": "ktrainer.backends.data_parallel:DataParallel",
    "pipeline": "ktrainer.backends.pipeline.backend:Pipeline",
    "tf_distribute": "ktrainer.backends.tf_distribute.backend:TfDistribute",
}


def open_backend(config: Config, plan: Plan, world: World) -> Backend:
    """The backend that `config.backend.name` names, on this process's device."""
    module, _, name = BACKENDS[config.backend.name].partition(":")
    return getattr(import_module(module), name)(config, plan, world)
