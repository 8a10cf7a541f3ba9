"""The table of `ktrainer verify`, from recorded numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ktrainer.verify.compare_runs import Arrays, compare


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


def test_rounding_is_equal() -> None:
    found = compare(recorded(), recorded(noise=1e-13))
    assert found.equal
    assert "differs" not in str(found)
    assert str(found).splitlines()[1].startswith("loss")


def test_runs_without_an_update_are_not_equal() -> None:
    alone = {name: value for name, value in recorded().items() if "/" not in name}
    assert not compare(alone, alone).equal


def test_a_factor_as_large_as_the_number_of_parts_is_a_sum() -> None:
    found = compare(recorded(), recorded(scale=0.25))
    assert not found.equal
    assert "smaller by the number of parts (4)" in found.cause
    assert "sum over examples" in found.cause
    first = str(found).splitlines()[1]
    assert first.startswith("loss ")
    assert first.endswith("differs")


@pytest.mark.parametrize("scale", [2.0, 31 / 30, 0.99999])
def test_any_other_factor_is_something_counted(scale: float) -> None:
    found = compare(recorded(), recorded(scale=scale))
    assert f"one factor ({1 / scale:.3g}, with 4 parts)" in found.cause
    assert "sum over examples" not in found.cause


def test_a_factor_of_some_variables_is_none() -> None:
    assert (
        "couples examples" in compare(recorded(), one("0001/gradient/00001:layer_1/kernel")).cause
    )


def test_other_gradients_couple_examples_or_use_statistics() -> None:
    assert "couples examples" in compare(recorded(), recorded(noise=0.5)).cause
    by_replica = {**recorded(noise=0.5), "statistics": np.array("replica")}
    assert "make it with synchronized=True" in compare(recorded(), by_replica).cause
    by_microbatch = {**recorded(noise=0.5), "statistics": np.array("microbatch")}
    assert "backend.microbatches=1" in compare(recorded(), by_microbatch).cause


def one(changed: str, variables: int = 3) -> Arrays:
    arrays = recorded(variables=variables)
    arrays[changed] = arrays[changed] + 1.0
    return arrays


def test_weights_alone_are_a_side_effect() -> None:
    found = compare(recorded(), one("0001/weight/00001:layer_1/kernel"))
    assert "side effect" in found.cause
    assert [row.name for row in found.rows if row.differs] == ["layer_1/kernel"]


def test_what_an_optimizer_makes_of_rounding_is_no_difference() -> None:
    whole, split = recorded(), recorded()
    key = "00000:layer_0/kernel"
    for arrays, sign in ((whole, 1), (split, -1)):
        arrays[f"0001/gradient/{key}"] = np.full((4, 3), sign * 1e-18)
        arrays[f"0001/weight/{key}"] = np.full((4, 3), sign * 1e-3)
    assert compare(whole, split).equal


def test_a_long_table_is_cut() -> None:
    lines = str(compare(recorded(variables=40), one("0001/loss/loss", 40))).splitlines()
    assert len(lines) == 32
    assert lines[-1] == "and 51 more, of which 0 differ"


def test_other_variables() -> None:
    found = compare(recorded(variables=3), recorded(variables=4))
    assert not found.equal
    assert "layer_3/kernel" in str(found)
