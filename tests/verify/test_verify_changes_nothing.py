"""`health.verify` changes nothing that trains, to the last bit, on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tf_distribute.running import ONE_PROCESS
from tests.verify import stateful_trainings
from tests.verify.test_first_update_check import under_mirrored

Ranks = Callable[..., Any]


def assert_same_bits(found: dict[str, list[Any]]) -> None:
    for name, (with_check, without) in found.items():
        assert with_check[0] == without[0], name
        assert with_check[2] == without[2], name
        for ours, truth in zip(with_check[1], without[1], strict=True):
            np.testing.assert_array_equal(ours, truth, err_msg=name)


@pytest.mark.exhaustive
def test_two_ranks(ranks: Ranks) -> None:
    names = ["numpy", "keras", "keeping", "meeting"]
    found = ranks(2).run(stateful_trainings.both, names, name="data_parallel", deadline=200)
    for rank in found:
        assert_same_bits(rank)
    kept = [rank["keeping"][0][2] for rank in found]
    assert kept[0] == kept[1]  # on the rank that checks and on the other
    assert kept[0][0] == stateful_trainings.STEPS


@pytest.mark.exhaustive
def test_mirrored_devices(ranks: Ranks) -> None:
    names = ["numpy", "counting"]
    run = ranks(1, ONE_PROCESS).run
    found = run(under_mirrored, stateful_trainings.both, names, deadline=200)[0]
    assert_same_bits(found)
    assert found["counting"][0][2][0] == stateful_trainings.STEPS
