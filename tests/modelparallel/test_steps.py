"""Steps through stages against the same loop in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.dist.harness import PerRank, Ranks
from tests.modelparallel import helpers


def same(found: Sequence[dict[str, Any]], want: dict[str, Any]) -> None:
    """Every rank's weights are those of one process, and together they have all of them."""
    for each in found:
        for name, value in each.items():
            np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-10, err_msg=name)
    assert {name for each in found for name in each} == set(want)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("pipeline", "traced"),
    [("interleaved", True), ("simple", False)],
    ids=["interleaved-traced", "simple-eager"],
)
def test_two_stages(ranks: Callable[..., Ranks], pipeline: str, traced: bool) -> None:
    group = ranks(2)
    (want, _) = group.run(helpers.single, 4)
    found = group.run(helpers.in_stages, traced, partitions=2, microbatches=4, pipeline=pipeline)
    same(found, want)
    assert all(set(found[k]) != set(want) for k in range(2)), "a rank has all variables"


def test_training_reaches_layers_without_a_parameter_and_by_default(
    ranks: Callable[..., Ranks],
) -> None:
    """Dropout and statistics are those of plain Keras."""
    for found in ranks(2).run(helpers.in_training):
        for predicted, want, variables, truth in found:
            np.testing.assert_allclose(predicted, want, rtol=0, atol=1e-12)
            for name, value in variables.items():
                np.testing.assert_allclose(value, truth[name], rtol=0, atol=1e-12, err_msg=name)


def test_a_weight_on_two_stages_is_one_without_a_seed(ranks: Callable[..., Ranks]) -> None:
    """Outputs are those of all weights in one process."""
    (first, predicted), (second, _) = ranks(2).run(helpers.tied_without_a_seed)
    kernel = first["tied/first/kernel"]
    np.testing.assert_array_equal(kernel, second["tied/first/kernel"])
    x, every = helpers.data()[0][0] @ kernel, {**first, **second}
    for k in range(3):
        x = x @ every[f"tied/inner_{k}/kernel"] + every[f"tied/inner_{k}/bias"]
    np.testing.assert_allclose(predicted, x @ kernel.T, rtol=0, atol=1e-12)


def test_a_body_that_branches_on_a_tensor(ranks: Callable[..., Ranks]) -> None:
    for once, twice in ranks(2).run(helpers.branching):
        assert twice == pytest.approx(2 * once, rel=1e-12)


@pytest.mark.exhaustive
def test_global_norm_and_own_gradients(ranks: Callable[..., Ranks]) -> None:
    """`tf.clip_by_global_norm` in the script counts all stages; `smp.gradients`; three stages."""
    group = ranks(3)
    want = group.run(helpers.single, 3, 0.05)[0]
    found = group.run(
        helpers.in_stages, True, own_tape=False, clip=0.05, partitions=3, microbatches=3
    )
    same(found, want)


@pytest.mark.exhaustive
def test_partitions_by_hand(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    want = group.run(helpers.single, 2)[0]
    by_hand = {"auto_partition": False, "default_partition": 0}
    found = group.run(helpers.in_stages, by_hand=True, partitions=2, microbatches=2, **by_hand)
    same(found, want)
    stages = [{name.split("/")[-2] for name in each if "/" in name} for each in found]
    assert stages == [{"dense_1", "norm"}, {"dense_2", "dense_3", "dense_4"}]
    found = group.run(helpers.in_stages, by_hand=True, partitions=2, microbatches=2)
    same(found, want)  # ignored with auto-partitioning


@pytest.mark.exhaustive
def test_two_by_two(ranks: Callable[..., Ranks]) -> None:
    """Replicas of stages reach the weights of one process with all microbatches."""
    group = ranks(4)
    want = group.run(helpers.single, 4, None, 0.0)[0]
    found = group.run(helpers.hybrid)
    for each in found:
        for name, value in each.items():
            np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-10, err_msg=name)
    assert set(found[0]) == set(found[2]) != set(found[1]) == set(found[3])


@pytest.mark.exhaustive
def test_only_forward(ranks: Callable[..., Ranks]) -> None:
    for loss, want, error in ranks(2).run(helpers.forward_only):
        assert abs(loss - want) < 1e-10
        assert "runs no backward passes" in error


def test_errors(ranks: Callable[..., Ranks]) -> None:
    """They name what is wrong; steps work afterwards, and no thread is left."""
    said = {
        "outside": "inside of a function decorated with @smp.step alone",
        "no call": "must depend on the model's output",
        "body": "ZeroDivisionError",
        "after": "ended in the middle",
        "size": "not divisible by microbatches=3",
        "partition": "an integer from 0 to 1",
        "norm": "all model.trainable_variables",
        "name": "names the argument 'z'",
        "nested": "inside of another",
        "more": "and of nothing else",
        "functional": "make a subclass",
        "axis": "batch axis",
        "second order": "was differentiated once more",
        "batch": "DivergenceError: the stages of a model were given different batches",
        "float16": "Use mixed_bfloat16",
    }
    for found in ranks(2).run(helpers.failures):
        for name, text in said.items():
            assert text in found[name], name
        assert found["hooks"] == "1"
        assert found["threads"] == "[]"


@pytest.mark.quick
@pytest.mark.parametrize("own_tapes", [True, False], ids=["tapes", "gradients"])
def test_gan(ranks: Callable[..., Ranks], own_tapes: bool) -> None:
    """Gradients go through one model in stages into another one, and to a variable before it."""
    group = ranks(2)
    want = group.run(helpers.gan, False)[0]
    same(group.run(helpers.gan, True, own_tapes), want)


def test_one_rank_fails(ranks: Callable[..., Ranks]) -> None:
    """The others end within the deadline, and name the rank that they wait for."""
    first, second = ranks(2).run(helpers.one_fails, PerRank([0, 1]))
    assert "ValueError: rank 1 alone" in second
    assert "DeadlineExceeded" in first
    assert "rank 1" in first
