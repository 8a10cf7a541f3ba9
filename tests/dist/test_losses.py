"""Losses that are sums, or couple examples, give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktrainer import ConfigError, ModelError, Trainer
from tests.dist import losses
from tests.dist.cases import Outcome, difference, train
from tests.dist.losses import ACCUMULATED, LOSSES
from tests.dist.small import more
from tests.tf_distribute.running import CLUSTER, ONE_PROCESS

_references: dict[str, Outcome] = {}


def compare(names: list[str], every: list[list[Outcome]]) -> None:
    """Every rank has the weights, logs and evaluation of one process."""
    largest = {}
    for i, name in enumerate(names):
        if name not in _references:
            (_references[name],) = losses.outcomes([name], backend="local")
        expected = _references[name]
        for ours in every:
            largest[name] = difference(expected, ours[i])
            assert ours[i].history.keys() == expected.history.keys()
            for key, values in expected.history.items():
                np.testing.assert_allclose(ours[i].history[key], values, 1e-11, err_msg=name)
            for key, value in expected.evaluated.items():
                np.testing.assert_allclose(ours[i].evaluated[key], value, 1e-11, err_msg=name)
    print({key: f"{value:.1e}" for key, value in largest.items()})
    assert max(largest.values()) <= 1e-12, largest


# Some are enough in everyday runs; `make test-all` shares out the others.
FIRST = ["added", "returned_accumulated", "differentiated", "differentiated_eagerly"]
FIRST += ["differentiated_by_xla", "returned_whole"]
SECOND = ["simclr", "clip", "ranking", "gathering_clip", "own_against_all", *ACCUMULATED]
THREE = ["differentiated_in_few_rows", "simclr_in_few_rows", "own_against_all_in_few_rows", "clip"]
OTHERS = [name for name in LOSSES if name not in FIRST + SECOND]
REST = [name for name in LOSSES if name not in THREE]


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, FIRST),
        (2, SECOND),
        more(2, OTHERS),
        (3, THREE),
        more(3, REST[: len(REST) // 2]),
        more(3, REST[len(REST) // 2 :]),
    ],
)
def test_data_parallel(ranks: Callable[..., Any], size: int, names: list[str]) -> None:
    ours = ranks(size).run(losses.outcomes, names, backend="data_parallel", deadline=280)
    compare(names, ours)


@pytest.mark.horovod
def test_data_parallel_through_horovod(ranks: Callable[..., Any]) -> None:
    names = ["added", "differentiated", "clip", "own_against_all"]
    ours = ranks(2, "horovod").run(
        losses.outcomes, names, backend="data_parallel", backend__engine="horovod", deadline=280
    )
    compare(names, ours)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("mirrored", ["added", "returned_accumulated", "differentiated", "differentiated_eagerly"]),
        ("mirrored", SECOND),
        more("mirrored", OTHERS),
        ("central_storage", ["added", "differentiated", "simclr", "own_against_all"]),
    ],
)
def test_replicas(ranks: Callable[..., Any], strategy: str, names: list[str]) -> None:
    settings = {"backend": "tf_distribute", "backend__strategy": strategy, "backend__devices": 2}
    ours = ranks(1, ONE_PROCESS).run(losses.outcomes, names, **settings, deadline=280)
    compare(names, ours)


def test_replicas_of_two_processes(ranks: Callable[..., Any]) -> None:
    names = ["differentiated", "clip", "own_against_all"]
    settings = {"backend": "tf_distribute", "backend__strategy": "multi_worker_mirrored"}
    ours = ranks(2, f"{CLUSTER} 1").run(
        losses.outcomes, names, **settings, backend__devices=1, deadline=250
    )
    compare(names, ours)


def test_without_it_ranks_have_another_loss(ranks: Callable[..., Any]) -> None:
    """Or the tests above would show nothing."""
    ours = ranks(2).run(_local_simclr, backend="data_parallel")
    assert difference(train(losses.simclr(), backend="local"), ours[0]) > 1e-3


def _local_simclr(**settings: Any) -> Outcome:
    return train(losses.simclr("local"), **settings)


def test_accumulated_updates_have_no_loss_of_the_whole_batch() -> None:
    words = ["trainer.loss_scope=global", "trainer.accumulate=2"]
    with pytest.raises(ConfigError, match=r"trainer\.loss_scope.*accumulate"):
        Trainer(overrides=words)


def test_what_cannot_be_gathered_is_refused(ranks: Callable[..., Any]) -> None:
    for text in ranks(2).run(_refusals):
        outside, compiled, views = text
        assert "outside of a step, with 2 ranks" in outside
        assert "trainer.xla=false" in compiled
        assert "one row for each example" in views


def _refusals() -> list[str]:
    import ktrainer

    found = []
    with Trainer(overrides=["backend=data_parallel"]):
        with pytest.raises(ModelError) as caught:
            ktrainer.all_gather(np.zeros((2, 3)))
        found.append(str(caught.value))
    with pytest.raises(ModelError) as caught:
        train(losses.simclr(), backend="data_parallel", trainer__xla="true")
    found.append(str(caught.value))
    with pytest.raises(ModelError) as caught:
        train(losses.doubled(), backend="data_parallel")
    return [*found, str(caught.value)]


def test_in_one_process_a_tensor_is_what_is_gathered() -> None:
    import ktrainer

    tensor = np.zeros((2, 3))
    assert ktrainer.all_gather(tensor) is tensor
