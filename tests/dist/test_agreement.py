"""What must be equal on all ranks is checked before step 1, and named if it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ktrainer.errors import DivergenceError
from tests.dist.cases import vectors
from tests.dist.small import make_trainer, small_model


def _unseeded_shuffle() -> None:
    import tensorflow as tf

    x, y = vectors()
    with make_trainer(seed="null") as trainer:
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(241).batch(32)
        trainer.fit(small_model(), data)


def test_an_unseeded_shuffle_is_found_before_step_1(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_unseeded_shuffle):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "data training/first batch/x" in str(outcome.error)
        assert "seed" in str(outcome.error)


def _another_model() -> None:
    with make_trainer() as trainer:
        trainer.fit(lambda: small_model(8 + trainer.world.rank), vectors())


def test_another_model_is_found_before_step_1(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(3).outcomes(_another_model):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "[8, 8]" in str(outcome.error)
        assert "[8, 10]" in str(outcome.error)


def _other_versions() -> None:
    from ktrainer.distributed import current_world
    from ktrainer.training import run

    keras = "3.15.1" if current_world().is_root else "3.14.0"
    original = run.versions_that_compute
    run.versions_that_compute = lambda: {**original(), "keras": keras}
    try:
        with make_trainer() as trainer:
            trainer.fit(small_model, vectors())
    finally:
        run.versions_that_compute = original


def test_other_library_versions_are_found(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_other_versions):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "keras" in str(outcome.error)
        assert "3.14.0" in str(outcome.error)


def _another_config() -> None:
    from ktrainer.distributed import current_world

    with make_trainer(lr__warmup=f"{1 + current_world().rank}ep") as trainer:
        trainer.fit(small_model, vectors())


def test_another_config_is_found_before_step_1(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_another_config):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "lr.warmup" in str(outcome.error)


_UNLIKE = {
    "seed": "null",
    "data__batch": "per_worker",
    "backend__engine": "horovod",
    "trainer__limit_val_batches": 0,
}


def _unlike(key: str) -> None:
    from ktrainer.distributed import current_world

    settings = {key: _UNLIKE[key]} if current_world().rank else {}
    with make_trainer(**settings, world__deadline=20) as trainer:
        trainer.fit(small_model, vectors(), validation_data=vectors())


@pytest.mark.parametrize("key", _UNLIKE)
def test_a_config_that_asks_for_other_collectives_is_found(
    ranks: Callable[..., Any], key: str
) -> None:
    for outcome in ranks(2).outcomes(_unlike, key):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert key.replace("__", ".") in str(outcome.error)


def _validate_on_one_rank() -> None:
    from ktrainer.distributed import current_world

    with make_trainer(world__deadline=20) as trainer:
        trainer.fit(
            small_model, vectors(), validation_data=vectors() if current_world().rank else None
        )


def test_validation_data_on_one_rank_only_is_found(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_validate_on_one_rank):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "validation data" in str(outcome.error)


def _another_kind() -> None:
    import tensorflow as tf

    from ktrainer.distributed import current_world

    data = vectors()
    if current_world().rank:
        data = tf.data.Dataset.from_tensor_slices(data).batch(32)
    with make_trainer(world__deadline=20) as trainer:
        trainer.fit(small_model, data)


def test_another_kind_of_data_is_found(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(3).outcomes(_another_kind):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "rank 0: arrays; ranks 1, 2: tf.data.Dataset" in str(outcome.error)


def _over_other_data(what: str) -> None:
    from ktrainer.distributed import current_world

    x, y = vectors()
    with make_trainer(world__deadline=20) as trainer:
        rows = len(x) - 64 * current_world().rank
        if what == "evaluate":
            trainer.evaluate(small_model, (x[:rows], y[:rows]))
        else:
            trainer.predict(small_model, x[:rows])


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_other_data_to_evaluate_or_predict_is_found(ranks: Callable[..., Any], what: str) -> None:
    for outcome in ranks(2).outcomes(_over_other_data, what):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "given/x" in str(outcome.error)


def _drift() -> None:
    import keras

    class Drift(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and trainer.world.rank == 1:
                bias = self.model.layers[-1].bias
                bias.assign_add([1e-7, 0, 0])

    with make_trainer((Drift(),), health__audit_every="4ba") as trainer:
        trainer.fit(small_model, vectors())


def test_the_audit_names_the_first_variable_that_differs(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_drift):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "bias" in str(outcome.error)
