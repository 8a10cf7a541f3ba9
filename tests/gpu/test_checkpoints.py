"""Checkpoints that are written on a GPU and read on the CPU, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import SEED, Outcome, assert_same
from tests.dist.harness import Ranks
from tests.gpu.compare import same_numbers
from tests.gpu.training import zoo

pytestmark = pytest.mark.gpu

NAME = "batch_norm_cnn"  # weights, statistics, slots


def trained(ranks: Ranks, folder: Path, epochs: int, **sections: Any) -> list[dict[str, Outcome]]:
    """Train until the end of an epoch, from the checkpoint in a folder if there is one."""
    settings: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "checkpoint": {"every": "1ba", "resume": "auto"},
        "trainer": {"epochs": epochs},
    }
    for key, section in sections.items():
        settings[key] = settings.get(key, {}) | section if isinstance(section, dict) else section
    return ranks.run(zoo, [NAME], deadline=120, **settings)


def assert_equal_weights(ours: Outcome, theirs: Outcome) -> None:
    """Bitwise equal weights and slots."""
    for part in ("weights", "slots"):
        pairs = zip(getattr(ours, part), getattr(theirs, part), strict=True)
        for (_, mine), (path, value) in pairs:
            np.testing.assert_array_equal(mine, value, err_msg=path)


def test_a_run_moves_from_the_cpu_to_the_gpu_and_back(
    on_device: Callable[..., Ranks], on_cpu: Ranks, seen: Callable[..., None], tmp_path: Path
) -> None:
    (truth,) = on_cpu.run(zoo, [NAME], trainer={"epochs": 3}, deadline=120)
    (first,) = trained(on_cpu, tmp_path, 1)
    (restored,) = trained(on_device(), tmp_path, 1)  # there is nothing left to do
    assert_equal_weights(restored[NAME], first[NAME])
    (second,) = trained(on_device(), tmp_path, 2)
    (restored,) = trained(on_cpu, tmp_path, 2)
    assert_equal_weights(restored[NAME], second[NAME])
    (third,) = trained(on_cpu, tmp_path, 3)
    seen(difference=same_numbers(third, truth))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_run_resumes_inside_an_epoch_with_the_same_bits(
    on_device: Callable[..., Ranks], tmp_path: Path, asynchronous: bool
) -> None:
    """The state that a background write keeps does not change with the updates after it."""
    same: dict[str, Any] = {"seed": SEED, "checkpoint": {"asynchronous": asynchronous}}
    (truth,) = trained(on_device(), tmp_path / "a", 2, **same, trainer={"deterministic": True})
    for limit in ({"max_steps": 4}, {}):  # inside the second epoch, of three updates
        settings = {"deterministic": True, **limit}
        (ours,) = trained(on_device(), tmp_path / "b", 2, **same, trainer=settings)
    assert_same(ours[NAME], truth[NAME])


def test_two_ranks_on_a_gpu_continue_as_one_on_the_cpu(
    on_device: Callable[..., Ranks],
    on_cpu: Ranks,
    truth: Callable[..., dict[str, Outcome]],
    seen: Callable[..., None],
    tmp_path: Path,
) -> None:
    """The statistics of batches differ between ranks, so without them."""
    settings = {"run": {"dir": str(tmp_path)}, "checkpoint": {"every": "1ep", "resume": "auto"}}
    on_device(2).run(
        zoo, ["mlp"], backend={"name": "data_parallel"}, trainer={"epochs": 1}, **settings
    )
    (ours,) = on_cpu.run(zoo, ["mlp"], **settings)
    seen(difference=same_numbers(ours, truth("mlp")))
