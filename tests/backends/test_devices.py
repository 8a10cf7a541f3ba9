"""Which GPU a rank takes and how; TensorFlow's devices are stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from ktrainer.config import load_config
from ktrainer.distributed import SingleWorld
from ktrainer.errors import ConfigError, SetupError
from ktrainer.plan.run_plan import make_plan
from ktrainer.runtime import hardware
from ktrainer.runtime.devices import claim_device
from ktrainer.runtime.hardware import Hardware


class Devices:
    """Stands in for `tf.config`, writing down what is set.

    Attributes:
        gpus: what TensorFlow finds.
        visible: what was made visible; None if nothing was said of it.
        growing: GPUs whose memory grows.
        threads: number of threads by kind.
        error: raised by every setting, as by a TensorFlow that already runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus: list[str] = []
        self.visible: list[str] | None = None
        self.growing: list[str] = []
        self.threads: dict[str, int] = {}
        self.error: RuntimeError | None = None
        threading = SimpleNamespace(
            set_intra_op_parallelism_threads=lambda n: self._set(self.threads, "intra", n),
            set_inter_op_parallelism_threads=lambda n: self._set(self.threads, "inter", n),
        )
        monkeypatch.setattr(tf.config, "list_physical_devices", self._list)
        monkeypatch.setattr(tf.config, "set_visible_devices", self._show)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self._grow)
        monkeypatch.setattr(tf.config, "threading", threading)

    def _list(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return list(self.gpus)

    def _show(self, devices: list[str], kind: str) -> None:
        assert kind == "GPU"
        self._set(self.__dict__, "visible", devices)

    def _grow(self, device: str, enable: bool) -> None:
        assert enable is True
        self._check()
        self.growing.append(device)

    def _set(self, where: dict[str, Any], name: str, value: Any) -> None:
        self._check()
        where[name] = value

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def world(local_rank: int, local_size: int, size: int | None = None) -> SingleWorld:
    """A rank of the second of two equal nodes, or of `size` ranks in all."""
    place = SingleWorld()
    place.local_rank, place.local_size = local_rank, local_size
    place.size = 2 * local_size if size is None else size
    place.rank = place.size - local_size + local_rank
    return place


@pytest.mark.parametrize(
    ("gpus", "local_rank", "taken"),
    [
        pytest.param("abcd", 0, "a", id="first"),
        pytest.param("abcd", 2, "c", id="third"),
        pytest.param("c", 2, "c", id="launcher shows one GPU"),
        pytest.param("ab", 1, "b", id="shared, first round"),
        pytest.param("ab", 3, "b", id="shared, second round"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(
    devices: Devices, gpus: str, local_rank: int, taken: str
) -> None:
    devices.gpus = list(gpus)
    claim_device(world(local_rank, local_size=4))
    assert devices.visible == devices.growing == [taken]


def test_one_process_keeps_all_gpus_and_their_memory_grows(devices: Devices) -> None:
    devices.gpus = ["a", "b"]
    claim_device(SingleWorld())
    assert devices.visible is None
    assert devices.growing == ["a", "b"]


def test_without_gpus_nothing_is_set(devices: Devices) -> None:
    claim_device(world(1, local_size=2))
    assert (devices.visible, devices.growing, devices.threads) == (None, [], {})


@pytest.mark.parametrize(("asked", "inter"), [(1, 2), (2, 2), (6, 6)])
def test_threads(devices: Devices, asked: int, inter: int) -> None:
    claim_device(world(0, local_size=2), threads=asked)
    assert devices.threads == {"intra": asked, "inter": inter}


@pytest.mark.parametrize("size", [1, 4])
def test_devices_already_in_use_are_an_error_that_says_what_to_do(
    devices: Devices, size: int
) -> None:
    devices.gpus = ["a", "b"]
    devices.error = RuntimeError("Physical devices cannot be modified after being initialized")
    with pytest.raises(SetupError, match="Make the Trainer first") as caught:
        claim_device(world(0, local_size=1, size=size))
    assert "after being initialized" in str(caught.value)
    assert caught.value.__cause__ is devices.error


def test_threads_already_set_are_no_error(devices: Devices) -> None:
    devices.error = RuntimeError("Intra op parallelism cannot be modified after initialization")
    claim_device(world(0, local_size=2), threads=3)
    assert devices.threads == {}


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_gpu_that_tensorflow_does_not_find_is_said_once_a_host(
    devices: Devices, local_rank: int
) -> None:
    said = pytest.warns(UserWarning, match=r"tensorflow\[and-cuda\]")
    with said if local_rank == 0 else contextlib.nullcontext():
        claim_device(world(local_rank, local_size=2), expects_gpu=True)
    devices.gpus = ["a"]
    claim_device(world(local_rank, local_size=2), expects_gpu=True)


def test_a_tensorflow_for_cpus_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    built = {"is_cuda_build": tf.test.is_built_with_cuda()}
    assert hardware.tensorflow_has_cuda() == built["is_cuda_build"]
    monkeypatch.setattr(hardware, "run_path", lambda path: {"build_info": built})
    monkeypatch.setattr(hardware, "_has_nccl", lambda: False)
    for cuda, gpus in ((False, 0), (True, 2)):
        built["is_cuda_build"] = cuda
        assert Hardware.detect(SingleWorld()).gpus == gpus


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"size": 4, "local_size": 4, "gpus": 2}, id="this node"),
        pytest.param({"size": 3, "local_size": 2, "gpus": 2, "own_gpu": False}, id="another node"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(facts: dict[str, Any]) -> None:
    config = load_config(None, ["backend=data_parallel", "backend.engine=horovod"])
    with pytest.raises(ConfigError, match="NCCL") as caught:
        make_plan(config, Hardware(cores=4, horovod=True, horovod_nccl=True, **facts))
    assert (caught.value.path, caught.value.value) == ("backend.engine", "horovod")
    assert make_plan(config, Hardware(cores=4, horovod=True, **facts)).engine == "horovod"
