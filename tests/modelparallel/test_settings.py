"""The keys of `init(config)`: defaults, alias, and errors before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from ktrainer.errors import ConfigError, SetupError
from ktrainer.modelparallel.settings import Settings, settings_of


def test_defaults() -> None:
    found = settings_of({"pipeline_parallel_degree": 4}, 8)
    assert found == Settings(
        partitions=4,
        microbatches=1,
        pipeline="interleaved",
        optimize="memory",
        auto_partition=True,
        default_partition=0,
        contiguous=True,
        placement_strategy="cluster",
        horovod=False,
        active_microbatches=6,
        memory_weight=0.8,
    )
    assert settings_of({"partitions": 2, "optimize": "speed"}, 2).memory_weight == 0.2


@pytest.mark.parametrize(
    "config, said",
    [
        (None, "needs the number of stages"),
        ({"partitions": 3}, "8 processes cannot hold replicas of 3 stages"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "are one key"),
        ({"partitions": 0}, "an integer of 1 or more"),
        ({"partitions": 2.0}, "an integer of 1 or more"),
        ({"partitions": 2, "microbatch": 2}, "Did you mean 'microbatches'"),
        ({"partitions": 2, "pipeline": "simpel"}, "Did you mean 'simple'"),
        ({"partitions": 2, "optimize": "size"}, "one of memory, speed"),
        ({"partitions": 2, "placement_strategy": "row"}, "one of cluster, spread"),
        ({"partitions": 2, "auto_partition": False}, "default_partition: is needed"),
        ({"partitions": 2, "default_partition": 2}, "from 0 to 1"),
        ({"partitions": 2, "horovod": 1}, "True or False"),
        ({"partitions": 2, "active_microbatches": 0}, "an integer of 1 or more"),
        ({"partitions": 2, "memory_weight": 1.5}, "from 0 to 1"),
    ],
)
def test_errors(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(config, 8)


REFUSED = {
    "MonitoredTrainingSession": "TensorFlow 2.0.*smp.gradients",
    "SessionRunHook": "TensorFlow 2.0",
    "Estimator": "2.16.*backend.name=pipeline",
    "DistributedOptimizer": "outside of the step.*g.accumulate",
    "DistributedGradientTape": '"horovod": True',
    "save": "CheckpointManager",
    "tp_rank": "partitions of smp.init",
    "GradScaler": "mixed_bfloat16",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_of_another_library_says_what_to_use(name: str) -> None:
    import ktrainer.modelparallel

    with pytest.raises(SetupError, match=REFUSED[name]):
        exec(f"from ktrainer.modelparallel import {name}")
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = ktrainer.modelparallel.frobnicate
    assert not [name for name in ktrainer.modelparallel.__all__ if name in REFUSED]
