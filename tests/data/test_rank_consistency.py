"""Consistency of ranks: before step 1 and while training; the facts that tell models apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest

from ktrainer import distributed
from ktrainer.data import rank_consistency
from ktrainer.distributed import SingleWorld
from ktrainer.errors import DivergenceError
from tests.data.feeds import feed, numbered
from tests.dist.harness import PerRank, Ranks

Group = Callable[..., Ranks]
FACTS: dict[str, Any] = {
    "config": {"seed": 0, "trainer": {"epochs": 3}},
    "model_facts": {"class": "Sequential", "layer 0": "Dense 12"},
    "data_facts": {"training/first batch/x": "aa"},
    "versions": {"tensorflow": "2.21.0"},
}


def _agree(facts: dict[str, Any]) -> None:
    rank_consistency.check_consistency(distributed.current_world(), **facts)


def _message(ranks: Group, size: int, *others: dict[str, Any]) -> str:
    """What each rank says, all the same, when the last ranks have other facts."""
    facts = [FACTS] * (size - len(others)) + [FACTS | other for other in others]
    outcomes = ranks(size).outcomes(_agree, PerRank(facts))
    assert all(isinstance(o.error, DivergenceError) for o in outcomes), outcomes
    assert len({str(o.error) for o in outcomes}) == 1
    return str(outcomes[0].error)


def test_equal_facts_pass(ranks: Group) -> None:
    ranks(2).run(_agree, FACTS)
    rank_consistency.check_consistency(SingleWorld(), **FACTS)


def test_what_differs_is_named(ranks: Group) -> None:
    text = _message(ranks, 3, {"config": {"seed": 1, "trainer": {"epochs": 3}}})
    assert "config seed: ranks 0, 1: 0; rank 2: 1" in text
    text = _message(ranks, 2, {"config": {"seed": 0, "trainer": {"epochs": 4}}})
    assert "config trainer.epochs: rank 0: 3; rank 1: 4" in text
    assert "same configuration" in text
    text = _message(ranks, 2, {"data_facts": {"training/first batch/x": "bb"}})
    assert "data training/first batch/x: rank 0: aa; rank 1: bb" in text
    assert "seed" in text
    text = _message(ranks, 2, {"versions": {"tensorflow": "2.20.0"}, "model_facts": {}})
    assert "version tensorflow: rank 0: 2.21.0; rank 1: 2.20.0" in text
    assert "model layer 0: rank 0: Dense 12; rank 1: missing" in text
    assert text.index("tensorflow") < text.index("layer 0")


def _audit(changed: list[str]) -> None:
    arrays = {
        "dense/kernel": np.ones((3, 4), np.float32),
        "dense/bias": np.zeros(4, ml_dtypes.bfloat16),
        "count": np.int64(3),
        "empty": np.zeros((0, 3)),
        "list": [1.0, 2.0],
    }
    for name in changed:
        arrays[name] = np.asarray(arrays[name]) + np.asarray(1, np.asarray(arrays[name]).dtype)
    rank_consistency.audit(distributed.current_world(), arrays)


def test_the_audit_names_the_first_array_that_differs(ranks: Group) -> None:
    ranks(3).run(_audit, [])
    changed = PerRank([[], ["count", "dense/bias"], []])
    for outcome in ranks(3).outcomes(_audit, changed):
        assert isinstance(outcome.error, DivergenceError)
        assert "'dense/bias' is not the same on all ranks: ranks 0, 2: " in str(outcome.error)
        assert "2 of 5 arrays differ" in str(outcome.error)


def _audit_names(names: list[str]) -> None:
    rank_consistency.audit(distributed.current_world(), {name: np.ones(3) for name in names})


def test_the_audit_of_other_names(ranks: Group) -> None:
    for outcome in ranks(2).outcomes(_audit_names, PerRank([["a", "b"], ["a"]])):
        assert "'b' is not the same on all ranks: rank 0: float64[3]" in str(outcome.error)
        assert "rank 1: missing" in str(outcome.error)
    for outcome in ranks(2).outcomes(_audit_names, PerRank([["a", "b"], ["b", "a"]])):
        assert "different orders" in str(outcome.error)


def _audit_seconds() -> float:
    arrays = {"weights": np.ones(2_900_000, np.float32)}
    rank_consistency.audit(distributed.current_world(), arrays)
    start = time.thread_time()
    rank_consistency.audit(distributed.current_world(), arrays)
    return time.thread_time() - start


def test_an_audit_of_12_mb_is_fast(ranks: Group) -> None:
    assert max(ranks(2).run(_audit_seconds)) < 0.25


def _model(units: int = 4, rate: float = 0.1, loss: str = "mse", lr: float = 0.1) -> keras.Model:
    dense = keras.layers.Dense(units, kernel_regularizer=lambda w: 0.0 * keras.ops.sum(w))
    model = keras.Sequential([keras.Input((3,)), dense, keras.layers.Dropout(rate)])
    model.compile(keras.optimizers.Adam(lr), loss, metrics=["mae"])
    return model


def test_model_facts_are_the_same_for_the_same_model() -> None:
    facts = rank_consistency.model_facts(_model())
    assert (
        rank_consistency.model_facts(_model()) == facts
    )  # layers are now called dense_1, dropout_1
    assert facts["variable 0 (sequential/dense/kernel)"] == "float32[3, 4]"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"units": 5}, "variable 0 (sequential/dense/kernel)"),
        ({"rate": 0.2}, "layer 2"),
        ({"loss": "mae"}, "compile loss"),
        ({"lr": 0.2}, "compile optimizer"),
    ],
)
def test_model_facts_tell_models_apart(options: dict[str, Any], name: str) -> None:
    one, two = (
        rank_consistency.model_facts(_model()),
        rank_consistency.model_facts(_model(**options)),
    )
    assert one[name] != two[name]


def _look_up(text: str, number: int) -> None:
    """Compare models that differ in nothing but the words that their layers were adapted to."""
    words = keras.layers.TextVectorization(max_tokens=4, name="words")
    words.adapt([text])
    numbers = keras.layers.IntegerLookup(max_tokens=2, invert=True)
    numbers.set_vocabulary([number])
    model = keras.Sequential([words, keras.layers.Embedding(4, 2), numbers])
    world = distributed.current_world()
    rank_consistency.check_consistency(world, model_facts=rank_consistency.model_facts(model))


def test_ranks_with_other_vocabularies_are_refused(ranks: Group) -> None:
    ranks(2).run(_look_up, "red green", 7)
    outcomes = ranks(2).outcomes(_look_up, PerRank(["red green", "red blue"]), PerRank([7, 8]))
    for outcome in outcomes:
        assert isinstance(outcome.error, DivergenceError)
        assert "model vocabulary of words: rank 0: 2 words, " in str(outcome.error)
        assert "model vocabulary of integer_lookup: rank 0: 1 words, " in str(outcome.error)
        assert "Adapt the layer to the same data on every rank" in str(outcome.error)


class _Private(keras.Model):
    """Not serialisable, and not built."""

    def __init__(self, secret: object) -> None:
        super().__init__()
        self.secret = secret

    def call(self, x: Any) -> Any:
        return x


def test_model_facts_of_what_cannot_be_serialised() -> None:
    model = _Private(object())
    model.compile(loss=lambda y, p: keras.ops.mean(p))
    assert rank_consistency.model_facts(model)["class"] == "_Private"
    assert rank_consistency.model_facts(_Private(object()))["class"] == "_Private"


def test_rates_can_be_left_out() -> None:
    def facts(**words: Any) -> dict[str, str]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        inner = keras.optimizers.SGD(**words)
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
        return rank_consistency.model_facts(model, rates=False)

    assert facts(learning_rate=0.1) == facts(learning_rate=0.2)
    assert facts(learning_rate=0.1) != facts(learning_rate=0.1, momentum=0.5)
    fast, slow = (keras.optimizers.schedules.CosineDecay(rate, 10) for rate in (0.1, 0.05))
    assert facts(learning_rate=fast) != facts(learning_rate=slow)  # each process has its own


def test_a_rank_that_joins_knows_less_of_its_data() -> None:
    theirs = rank_consistency.named_facts({"a": 1}, {"layer 0": "Dense"}, {"x": "5", "y": "6"})
    mine = {name: fact for name, fact in theirs.items() if name != "data y"}
    rank_consistency.require_same_facts(mine, theirs)
    rank_consistency.require_same_facts(theirs, mine)
    for name in mine:
        with pytest.raises(DivergenceError, match=f"cannot join: {name} is 7 here"):
            rank_consistency.require_same_facts(mine | {name: "7"}, theirs)
    with pytest.raises(DivergenceError, match="model layer 1 is Softmax here, but missing on the"):
        rank_consistency.require_same_facts(mine | {"model layer 1": "Softmax"}, theirs)


def test_data_facts_are_prefixed() -> None:
    facts = rank_consistency.data_facts(feed(numbered(8)), "validation")
    assert {"validation/x", "validation/length"} <= set(facts)
