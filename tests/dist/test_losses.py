"""Losses that are sums, or couple examples, give the numbers of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktrainer import ConfigError, ModelError, Trainer
from tests.dist import cases, losses
from tests.dist.cases import Outcome, difference, train
from tests.tf_distribute.running import CLUSTER, ONE_PROCESS

_references: dict[str, Outcome] = {}


def compare(names: list[str], every: list[list[Outcome]]) -> None:
    """Every rank has the weights, logs and evaluation of one process."""
    for name in names:
        if name not in _references:
            (_references[name],) = losses.outcomes([name], backend="local")
    cases.compare([_references[name] for name in names], every, names, 1e-12, 1e-11)


# Losses that are sums over examples, and those that couple them.
SUMS = ["added", "added_accumulated", "returned_whole", "returned_accumulated"]
SUMS += ["of_some_accumulated", "differentiated", "differentiated_eagerly", "differentiated_by_xla"]
COUPLED = ["simclr", "clip", "ranking", "gathering_clip", "own_against_all"]
COUPLED += ["sums_of_gathered_accumulated"]
FEW_ROWS = ["differentiated_in_few_rows", "simclr_in_few_rows", "own_against_all_in_few_rows"]


PARALLEL = {"backend": "data_parallel"}
HOROVOD = {**PARALLEL, "backend__engine": "horovod"}
MIRRORED = {"backend": "tf_distribute", "backend__strategy": "mirrored", "backend__devices": 2}
CENTRAL = {**MIRRORED, "backend__strategy": "central_storage"}
WORKERS = {**MIRRORED, "backend__strategy": "multi_worker_mirrored", "backend__devices": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("group", "settings", "names"),
    [
        ((2,), PARALLEL, SUMS),
        ((2,), PARALLEL, COUPLED),
        ((3,), PARALLEL, FEW_ROWS),
        pytest.param(
            (2, "horovod"), HOROVOD, ["added", "own_against_all"], marks=pytest.mark.horovod
        ),
        (
            (1, ONE_PROCESS),
            MIRRORED,
            ["added", "of_some", "returned_accumulated", "differentiated_eagerly"],
        ),
        ((1, ONE_PROCESS), MIRRORED, ["simclr", "sums_of_gathered_accumulated"]),
        ((1, ONE_PROCESS), CENTRAL, ["differentiated", "simclr"]),
        ((2, f"{CLUSTER} 1"), WORKERS, ["differentiated", "own_against_all"]),
    ],
    ids=lambda v: "-".join(map(str, list(v.values())[:2])) if isinstance(v, dict) else "",
)
def test_the_losses_of_one_process(
    ranks: Callable[..., Any], group: tuple[Any, ...], settings: dict[str, Any], names: list[str]
) -> None:
    compare(names, ranks(*group).run(losses.outcomes, names, **settings, deadline=280))


def test_losses_of_rows_that_data_choose(ranks: Callable[..., Any]) -> None:
    compare(["of_some"], ranks(2).run(_outcomes_without_warnings, ["of_some"], deadline=200))


def test_weights_that_spread_the_values_of_a_loss(ranks: Callable[..., Any]) -> None:
    names = ["spread", "spread_accumulated"]
    compare(names, ranks(2).run(losses.outcomes, names, backend="data_parallel", deadline=200))


def test_gradients_that_are_computed_in_pieces(ranks: Callable[..., Any]) -> None:
    names = ["in_pieces", "in_pieces_accumulated", "in_pieces_of_rows", "reversed"]
    compare(names, ranks(2).run(losses.outcomes, names, backend="data_parallel", deadline=200))


def test_a_rank_without_such_rows_waits_for_none(ranks: Callable[..., Any]) -> None:
    names = ["of_any", "of_any_eagerly"]
    first, second = ranks(2).run(losses.outcomes, names, backend="data_parallel", deadline=90)
    cases.compare(first, [second], names)


def _outcomes_without_warnings(names: list[str]) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*one process")  # by the check before the first update
        return losses.outcomes(names, backend="data_parallel")


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
        outside, summed, compiled, views = text
        assert "outside of a step, with 2 ranks" in outside
        assert "calls `all_reduce` of TensorFlow's replica context" in summed
        assert "trainer.xla=false" in compiled
        assert "one row for each example" in views


def _refusals() -> list[str]:
    import keras
    import tensorflow as tf

    import ktrainer

    def summed_loss(y: Any, p: Any) -> Any:
        loss = tf.reduce_mean((y - p) ** 2)
        return tf.distribute.get_replica_context().all_reduce("SUM", loss)

    found = []
    with Trainer(overrides=["backend=data_parallel", "logging.progress=none"]) as trainer:
        with pytest.raises(ModelError) as caught:
            ktrainer.all_gather(np.zeros((2, 3)))
        found.append(str(caught.value))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", summed_loss)
        with pytest.raises(ModelError) as caught:
            trainer.fit(model, np.zeros((8, 3)), np.zeros((8, 3)))
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
