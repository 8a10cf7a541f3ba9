"""What cannot run is refused before anything starts, saying what to use."""

from __future__ import annotations

import pytest

from ktrainer.config import load_config
from ktrainer.errors import ConfigError
from ktrainer.plan.run_plan import Plan, make_plan
from ktrainer.runtime.hardware import Hardware

SEVERAL = ["strategy=multi_worker_mirrored"]


def plan(*words: str, **facts: object) -> Plan:
    config = load_config(None, ["backend=tf_distribute", *words])
    return make_plan(config, Hardware(**facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "facts", "path", "says"),
    [
        (["strategy=mirrored"], {"size": 2}, "strategy", "multi_worker_mirrored"),
        (["strategy=mirrored", "cross_device_ops=nccl"], {}, "cross_device_ops", "NCCL needs GPUs"),
        (["strategy=multi_worker_mirrored", "communication=nccl"], {}, "communication", "ring"),
        (["strategy=tpu"], {}, "strategy", "no TPU here"),
        (["strategy=parameter_server"], {}, "strategy", "--workers 2 --servers 1"),
        (["devices=3"], {"gpus": 2}, "devices", "there are 2 GPUs"),
        (["devices=[GPU:0]"], {}, "devices", "there are no GPUs"),
        (["devices=0"], {}, "devices", "at least one"),
        (["devices=[0,1]"], {}, "devices", "GPU:0, GPU:1"),
        (["devices=[CPU:0,GPU:0]"], {"gpus": 1}, "devices", "one kind"),
        (["devices=[GPU:0,gpu:0]"], {"gpus": 1}, "devices", "listed twice"),
        (["strategy=one_device", "devices=2"], {}, "devices", "mirrored"),
        (["strategy=default", "devices=2"], {}, "devices", "has no effect"),
        (["communication=ring"], {}, "communication", "multi_worker_mirrored"),
        (["join=step"], {}, "join", "parameter_server"),
        (["strategy=mirored"], {}, "strategy", "mirrored"),
        (["strategy=mirrored", "bytes_per_pack=-1"], {}, "bytes_per_pack", "at least 0"),
        (["auto_shard=file"], {}, "auto_shard", "multi_worker_mirrored"),
        ([*SEVERAL, "auto_shard=off"], {"size": 2}, "auto_shard", "data.batch=per_worker"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, words: list[str], facts: dict, path: str, says: str
) -> None:
    monkeypatch.delenv("TPU_NAME", raising=False)
    with pytest.raises(ConfigError, match=says) as caught:
        plan(*(f"backend.{word}" for word in words), **facts)
    assert caught.value.path == f"backend.{path}"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["backend.strategy=central_storage", "trainer.xla=true"], "trainer.xla"),
        (["backend.strategy=parameter_server", "trainer.xla=true"], "trainer.xla"),
        (["backend.strategy=parameter_server", "trainer.steps_per_call=2"], "steps_per_call"),
        (["backend.strategy=tpu", "trainer.loss_scope=global"], "trainer.loss_scope"),
        ([f"backend.{SEVERAL[0]}", "backend.auto_shard=file", "data.shard=element"], "auto_shard"),
        ([f"backend.{SEVERAL[0]}", "backend.auto_shard=off", "data.shard=file"], "auto_shard"),
    ],
)
def test_settings_that_contradict_the_strategy(words: list[str], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        plan(*words, workers=2)


@pytest.mark.parametrize(
    ("words", "facts", "devices", "logical"),
    [
        ([], {}, ("CPU:0",), 0),
        ([], {"gpus": 2}, ("GPU:0", "GPU:1"), 0),
        (["devices=2"], {}, ("CPU:0", "CPU:1"), 2),
        (["devices=2"], {"gpus": 4}, ("GPU:0", "GPU:1"), 0),
        (["devices=[/gpu:1]"], {"gpus": 2}, ("GPU:1",), 0),
        (["devices=[CPU:1]"], {}, ("CPU:1",), 2),
        (["strategy=one_device"], {"gpus": 2}, ("GPU:0",), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_devices(words: list[str], facts: dict, devices: tuple[str, ...], logical: int) -> None:
    layout = plan(*(f"backend.{word}" for word in words), **facts).strategy
    assert layout is not None
    assert (layout.devices, layout.logical) == (devices, logical)


@pytest.mark.parametrize(("auto_shard", "shard"), [("data", "batch"), ("file", "file")])
def test_fit_reads_data_as_trainer_distribute_does(auto_shard: str, shard: str) -> None:
    words = ["backend.strategy=multi_worker_mirrored", f"backend.auto_shard={auto_shard}"]
    assert load_config(None, ["backend=tf_distribute", *words]).data.shard == shard


def test_two_processes_share_the_gpus_of_a_node() -> None:
    layout = plan("backend.strategy=multi_worker_mirrored", size=2, local_size=2, gpus=4).strategy
    assert layout is not None
    assert (layout.devices, layout.processes) == (("GPU:0", "GPU:1"), 2)


def test_the_plan_says_so() -> None:
    assert "strategy  mirrored on CPU:0, CPU:1" in str(plan("backend.devices=2"))
    said = str(plan("backend.strategy=parameter_server", workers=3))
    assert "strategy  parameter_server, 3 workers" in said
