"""What a run says of the GPU that it trained on: memory, utilization, where the time went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Callback, Trainer
from tests.contracts.running import config
from tests.dist.harness import Ranks, keras_state
from tests.gpu.device import Device
from tests.gpu.training import parallel

pytestmark = pytest.mark.gpu

MIB = 2**20
WIDE, BATCH, STEPS = 2048, 256, 40


class Rows(Callback):
    """Rows of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def on_log(self, step: int, logs: dict[str, float]) -> None:
        self.rows.append(dict(logs))


def fitted(width: int, steps: int, **sections: Any) -> tuple[list[dict[str, float]], Any]:
    """The rows of a training of three wide layers, its trainer and its model."""
    keras_state.clear()
    rows, parallel_backend = Rows(), parallel()
    settings = config(backend=parallel_backend, **sections, data={"batch_size": BATCH})
    settings["trainer"] = {"epochs": 1, **sections.get("trainer", {})}
    with Trainer(settings, callbacks=[rows]) as trainer:
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6, momentum=0.9), "mse")
        x = np.ones((BATCH * steps, width), np.float32)
        trainer.fit(model, x, x[:, :1])
    return rows.rows, model


def watched(width: int = WIDE) -> dict[str, Any]:
    """What is logged of memory and speed, and what it must agree with."""
    every = {"logging": {"every": "5ba"}}
    rows, model = fitted(width, STEPS, watch={"memory": True, "utilization": True}, **every)
    variables = [*model.variables, *model.optimizer.variables]
    gpus = tf.config.list_logical_devices("GPU")
    infos = [tf.config.experimental.get_memory_info(gpu.name) for gpu in gpus]
    return {
        "rows": rows,
        "variables": sum(v.value.numpy().nbytes for v in variables) / MIB,
        "peak": max((info["peak"] for info in infos), default=0) / MIB,
    }


def logged(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize("size", [1, 2])
def test_memory_and_utilization_are_logged(
    on_device: Callable[..., Ranks], device: Device, seen: Callable[..., None], size: int
) -> None:
    width = WIDE if device.is_gpu else 128
    every = on_device(size).run(watched, width, deadline=240)
    rows = every[0]["rows"]
    now, peaks = logged(rows, "memory/gpu_mib"), logged(rows, "memory/gpu_peak_mib")
    utilization = logged(rows, "speed/utilization")
    seen(
        variables_mib=every[0]["variables"],
        gpu_peak_mib=max(peaks, default=0),
        utilization=max(utilization),
    )
    assert 0 < max(utilization) < 1
    if not device.is_gpu:
        assert not now
        assert not peaks
        return
    assert len(now) == len(peaks) == STEPS // 5
    assert min(now) >= every[0]["variables"]
    assert all(each <= peak for each, peak in zip(now, peaks, strict=True))
    assert peaks[-1] <= max(rank["peak"] for rank in every)


def traced(folder: str) -> dict[str, Any]:
    """The trace of two updates, with TensorFlow's operations."""
    profile = {"steps": "10-11", "tensorflow": True}
    fitted(128, 20, run={"dir": folder}, trainer={"profile": profile})
    found: dict[str, Any] = json.loads((Path(folder) / "trace.json").read_text())
    return found


def test_a_trace_has_the_operations_of_the_device(
    on_device: Callable[..., Ranks], device: Device, seen: Callable[..., None], tmp_path: Path
) -> None:
    (trace,) = on_device().run(traced, str(tmp_path / "run"), deadline=240)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "steps"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    lanes: dict[str, int] = {}
    for event in spans:
        if event["cat"].startswith("TensorFlow: ") and begin < event["ts"] < end:
            lanes[event["cat"]] = lanes.get(event["cat"], 0) + 1
    of_gpu = {lane: count for lane, count in lanes.items() if "Stream" in lane}
    seen(steps=len(steps), lanes=len(lanes), lanes_of_the_gpu=of_gpu)
    assert lanes
    assert bool(of_gpu) == device.is_gpu
