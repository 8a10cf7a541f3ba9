"""The table of `ktrainer verify`, from recorded numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer.verify.compare_runs import Arrays, Comparison, compare, load
from tests.verify import models


def recorded(scale: float = 1.0, noise: float = 0.0, variables: int = 3) -> dict[str, np.ndarray]:
    random, other = np.random.default_rng(1), np.random.default_rng(2)
    arrays = {"precision": np.array("float64"), "0001/loss/loss": np.array(3.0 * scale)}
    arrays["parts"] = np.array(4)
    for i in range(variables):
        value = random.normal(size=(4, 3))
        key = f"{i:05}:layer_{i}/kernel"
        arrays[f"0001/gradient/{key}"] = scale * value + noise * other.normal(size=(4, 3))
        arrays[f"0001/weight/{key}"] = value - 0.1 * scale * value
    return arrays


def compared(unsplit: Arrays, split: Arrays) -> Comparison:
    random = np.random.default_rng(1)
    initial = {f"{i:05}:layer_{i}/kernel": random.normal(size=(4, 3)) for i in range(40)}
    return compare(unsplit, split, initial | {f"ulp/{name}": 2.0**-52 for name in initial})


def test_rounding_is_equal() -> None:
    found = compared(recorded(), recorded(noise=1e-13))
    assert found.equal
    assert "differs" not in str(found)
    assert str(found).splitlines()[1].startswith("loss")


def test_runs_without_an_update_are_not_equal() -> None:
    alone = {name: value for name, value in recorded().items() if "/" not in name}
    assert not compared(alone, alone).equal


def test_a_factor_as_large_as_the_number_of_parts_is_a_sum() -> None:
    found = compared(recorded(), recorded(scale=0.25))
    assert not found.equal
    assert "smaller by the number of parts (4)" in found.cause
    assert "sum over examples" in found.cause
    first = str(found).splitlines()[1]
    assert first.startswith("loss ")
    assert first.endswith("differs")


@pytest.mark.parametrize("scale", [2.0, 31 / 30, 0.99999])
def test_any_other_factor_is_something_counted(scale: float) -> None:
    found = compared(recorded(), recorded(scale=scale))
    assert f"one factor ({1 / scale:.3g}, with 4 parts)" in found.cause
    assert "sum over examples" not in found.cause


def test_a_factor_of_some_variables_is_none() -> None:
    assert (
        "couples examples" in compared(recorded(), one("0001/gradient/00001:layer_1/kernel")).cause
    )


def test_other_gradients_couple_examples_or_use_statistics() -> None:
    assert "couples examples" in compared(recorded(), recorded(noise=0.5)).cause
    by_replica = {**recorded(noise=0.5), "statistics": np.array("replica")}
    assert "make it with synchronized=True" in compared(recorded(), by_replica).cause
    by_microbatch = {**recorded(noise=0.5), "statistics": np.array("microbatch")}
    assert "backend.microbatches=1" in compared(recorded(), by_microbatch).cause


def one(changed: str, variables: int = 3) -> Arrays:
    arrays = recorded(variables=variables)
    arrays[changed] = arrays[changed] + 1.0
    return arrays


def test_weights_alone_are_a_side_effect() -> None:
    found = compared(recorded(), one("0001/weight/00001:layer_1/kernel"))
    assert "side effect" in found.cause
    assert [row.name for row in found.rows if row.differs] == ["layer_1/kernel"]


def test_what_an_optimizer_makes_of_rounding_is_no_difference() -> None:
    whole, split = recorded(), recorded()
    key = "00000:layer_0/kernel"
    for arrays, sign in ((whole, 1), (split, -1)):
        arrays[f"0001/gradient/{key}"] = np.full((4, 3), sign * 1e-18)
        arrays[f"0001/weight/{key}"] = np.full((4, 3), sign * 1e-3)
    assert compared(whole, split).equal


def test_a_long_table_is_cut() -> None:
    lines = str(compared(recorded(variables=40), one("0001/loss/loss", 40))).splitlines()
    assert len(lines) == 32
    assert lines[-1] == "and 51 more, of which 0 differ"


def test_other_variables() -> None:
    found = compared(recorded(variables=3), recorded(variables=4))
    assert not found.equal
    assert "layer_3/kernel" in str(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of one process."""
    folder = tmp_path_factory.mktemp("whole")
    models.record("unsplit", str(folder), 1e-3)
    return folder


def recorded_by(folder: Path) -> Comparison:
    return compare(*(load(folder, role) for role in ("unsplit", "split", "initial")))


@pytest.mark.parametrize("rate", [1e-3, 2e-3])
def test_a_learning_rate_that_depends_on_the_number_of_ranks(
    ranks: Callable[..., Any], whole: Path, tmp_path: Path, rate: float
) -> None:
    """Two updates move weights by far less than their size, and by another factor."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    ranks(2).run(models.record, "split", str(tmp_path), rate, backend={"name": "data_parallel"})
    found = recorded_by(tmp_path)
    weights = [row for row in found.rows if row.kind == "weight"]
    assert len(weights) == 5
    assert found.equal == (rate == 1e-3), str(found)
    if not found.equal:
        moved = [row for row in weights if row.name != "steps/steps"]
        assert [row.difference for row in moved] == pytest.approx([0.5] * 4, rel=0.01)
        assert "its learning rate, depends on the number" in found.cause


def test_integers_must_be_equal(tmp_path: Path) -> None:
    """Steps that a model counts by itself are more with accumulation."""
    for role in ("unsplit", "split"):
        models.record(role, str(tmp_path), 1e-3, trainer={"accumulate": 2})
    found = recorded_by(tmp_path)
    assert [row.name for row in found.rows if row.differs] == ["steps/steps"], str(found)
    assert "side effect" in found.cause
