"""Ways to run a step: one class a backend, one line a backend in the table.

base.py            the interface of all
local.py           one process
data_parallel.py   each process has the whole model, and a share of every batch
pipeline/          each process has stages of the model
tf_distribute/     TensorFlow's strategies
devices.py         which GPU a process takes, and how many threads
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktrainer.backends.base import Backend
    from ktrainer.config import Config
    from ktrainer.plan import Plan
    from ktrainer.world import World

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
