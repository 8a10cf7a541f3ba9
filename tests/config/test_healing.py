"""What `world.heal` needs, and how the launcher tells the ranks."""

from __future__ import annotations

import pytest

from ktrainer.config import load_config
from ktrainer.config.launch_environment import as_launched, to_environment
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import make_plan
from ktrainer.runtime.hardware import Hardware

HYBRID = ["world.heal=true", "backend=pipeline", "backend.partitions=2"]
HEAL = ["world.heal=true", "backend=data_parallel"]


@pytest.mark.parametrize(
    ("words", "path", "says"),
    [
        (["world.heal=true"], "world.heal", "only backend=data_parallel"),
        (["world.heal=true", "backend=tf_distribute"], "world.heal", "--max-restarts"),
        ([*HYBRID, "backend.engine=horovod"], "backend.engine", "backend.engine=mpi"),
        ([*HYBRID, "world.replace=true"], "world.replace", "hold different stages"),
        ([*HYBRID, "world.max_size=4"], "world.max_size", "--max-restarts"),
        ([*HYBRID, "world.min_size=2"], "world.min_size", "--max-restarts"),
        ([*HEAL, "backend.engine=horovod"], "backend.engine", "backend.engine=mpi"),
        ([*HEAL, "backend.op=sum"], "backend.op", "backend.op=average"),
        ([*HEAL, "backend.local_layers=[head]"], "backend.local_layers", "--max-restarts"),
        ([*HEAL, "data.batch=per_worker"], "data.batch", "data.batch=global"),
        ([*HEAL, "data.shard=element"], "data.shard", "data.shard=batch"),
        ([*HEAL, "world.min_size=3", "world.max_size=2"], "world.max_size", "world.min_size=3"),
        (["world.replace=true"], "world.replace", "world.heal=true"),
        (["world.max_size=4"], "world.max_size", "world.heal=true"),
    ],
)
def test_refused(words, path, says):
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(None, words)
    assert raised.value.path == path


def test_a_least_size_needs_healing_which_the_launcher_may_have_set():
    config = load_config(None, ["backend=data_parallel", "world.min_size=2"])
    facts = Hardware(size=2, local_size=2)
    with pytest.raises(ConfigError, match="--heal") as raised:
        make_plan(config, facts)
    assert raised.value.path == "world.min_size"
    assert make_plan(as_launched(config, to_environment({"heal": True})), facts).size == 2


def test_the_launcher_tells_the_ranks():
    config = load_config(None, ["backend=data_parallel", "world.deadline=5"])
    assert as_launched(config, {}) is config
    told = to_environment({"heal": True, "min_size": 2})
    world = as_launched(config, told).world
    assert (world.heal, world.min_size, world.deadline) == (True, 2, 5.0)
    assert to_environment({}) == {}


def test_the_launchers_word_is_checked_too():
    told = to_environment({"heal": True})
    with pytest.raises(ConfigError, match="only backend=data_parallel"):
        as_launched(load_config(None, []), told)


def test_auto_means_mpi_also_where_horovod_has_nccl():
    facts = Hardware(size=2, local_size=2, gpus=2, horovod=True, horovod_nccl=True)
    assert make_plan(load_config(None, HEAL[1:]), facts).engine == "horovod"
    assert make_plan(load_config(None, HEAL), facts).engine == "mpi"


def test_a_pipeline_needs_a_second_copy():
    config = load_config(None, HYBRID)
    with pytest.raises(ConfigError, match="start 4 processes for two replicas") as raised:
        make_plan(config, Hardware(size=2))
    assert raised.value.path == "world.heal"
    plan = make_plan(config, Hardware(size=4, horovod=True, gpus=4, local_size=4))
    assert plan.engine == "mpi"
    assert "surviving replicas save the state" in str(plan)
