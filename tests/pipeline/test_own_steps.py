"""A model's own steps in stages against the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dist.harness import Ranks
from tests.pipeline import own_steps
from tests.pipeline.own_steps import trained


def stages(partitions: int, microbatches: int = 3) -> tuple[str, ...]:
    return (
        "backend=pipeline",
        f"backend.partitions={partitions}",
        f"backend.microbatches={microbatches}",
        "backend.costs=uniform",
        "world.deadline=60",
    )


def same(found: list[dict[str, Any]], want: dict[str, Any]) -> None:
    """Every rank has the numbers of one process, and together they have all variables."""
    for each in found:
        for part in ("history", "evaluated", "variables"):
            for name, value in each[part].items():
                truth = want[part][name]
                np.testing.assert_allclose(value, truth, 1e-10, 1e-12, err_msg=f"{part} {name}")
        np.testing.assert_allclose(each["predicted"], want["predicted"], 1e-10, 1e-12)
        assert each["history"].keys() == want["history"].keys()
    assert {name for each in found for name in each["variables"]} == set(want["variables"])


@pytest.mark.parametrize("build", ["usual", "coupled", "twice", "tied"])
def test_stages_equal_one_process(ranks: Callable[..., Ranks], build: str) -> None:
    model = getattr(own_steps, build)
    seen = own_steps.tokens if build == "tied" else own_steps.data
    want = trained(model, "backend=local", seen=seen)
    found = ranks(3).run(trained, model, *stages(3), seen=seen)
    same(found, want)
    assert all(set(each["variables"]) != set(want["variables"]) for each in found)
