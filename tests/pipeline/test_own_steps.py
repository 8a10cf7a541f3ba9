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


@pytest.mark.quick("coupled")
@pytest.mark.parametrize("build", ["coupled", "twice", "tied", "spectral"])
def test_stages_equal_one_process(ranks: Callable[..., Ranks], build: str) -> None:
    model = getattr(own_steps, build)
    seen = own_steps.tokens if build == "tied" else own_steps.data
    want = trained(model, "backend=local", seen=seen)
    found = ranks(3).run(trained, model, *stages(3), seen=seen)
    same(found, want)
    assert all(set(each["variables"]) != set(want["variables"]) for each in found)


@pytest.mark.exhaustive
def test_two_stages_and_two_replicas(ranks: Callable[..., Ranks]) -> None:
    want = trained(own_steps.usual, "backend=local")
    same(ranks(4).run(trained, own_steps.usual, *stages(2, 2)), want)


@pytest.mark.exhaustive
def test_one_stage(ranks: Callable[..., Ranks]) -> None:
    want = trained(own_steps.coupled, "backend=local")
    same(ranks(1).run(trained, own_steps.coupled, *stages(1)), want)


@pytest.mark.exhaustive
def test_replicas_with_fewer_microbatches_keep_the_same_seeds(ranks: Callable[..., Ranks]) -> None:
    words = (*stages(2), "health.audit_every=1ba", "data.batch_size=5")  # 3 and 2 rows
    found = ranks(4).run(trained, own_steps.dropped, *words, seen=own_steps.tokens)
    seeds = [v for each in found for name, v in each["variables"].items() if "seed" in name]
    assert len(seeds) == 2
    assert seeds[0][1] > 0
    np.testing.assert_array_equal(*seeds)


@pytest.mark.exhaustive
def test_a_step_that_ended_in_the_middle_is_noticed(ranks: Callable[..., Ranks]) -> None:
    for first, second in ranks(2, "ends").run(own_steps.interrupted, *stages(2)):
        assert "the loss of this script" in first
        assert "ended in the middle" in second


WRONG = {  # without a refusal
    "combined": "depends on that of",
    "penalty": "what it computes must depend on the batch and on the model's outputs alone",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "impossible"])
def test_refused(ranks: Callable[..., Ranks], wrong: bool) -> None:
    impossible = {
        "layers": "but no layer of it",
        "no_call": "does not call the model, self(x)",
        "two_optimizers": "has several optimizers",
        "accumulate": "trainer.accumulate. Set it to 1",
    }
    said = WRONG if wrong else impossible
    for found in ranks(2).run(own_steps.refused, list(said), *stages(2)):
        for name, text in said.items():
            assert text in found[name], (name, found[name])


@pytest.mark.exhaustive
def test_resumed(ranks: Callable[..., Ranks], tmp_path: Any) -> None:
    """A run that is continued ends as one that was never stopped."""
    want = trained(own_steps.usual, "backend=local")
    words = (*stages(2), "checkpoint.every=1ep", f"checkpoint.dir={tmp_path}")
    group = ranks(2)
    group.run(trained, own_steps.usual, *words, "trainer.epochs=1")
    found = group.run(trained, own_steps.usual, *words)
    for each in found:
        for name, value in each["variables"].items():
            np.testing.assert_allclose(value, want["variables"][name], 1e-10, 1e-12, err_msg=name)
        np.testing.assert_allclose(each["predicted"], want["predicted"], 1e-10, 1e-12)
