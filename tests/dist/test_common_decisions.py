"""What ranks decide, they decide together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer.checkpoint import Store
from ktrainer.errors import DataError, DeadlineExceeded, ModelError
from tests.dist.cases import vectors
from tests.dist.small import ENGINES, group_mode, make_trainer, small_model, weights_of


def _leave_early() -> None:
    import keras

    class Leave(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                trainer.world.deadline = 1.0  # of no wait before, which steps are traced in
                if trainer.world.rank == 1:
                    raise ValueError("enough")

    with make_trainer((Leave(),)) as trainer:
        trainer.fit(small_model, vectors())


def test_a_wait_for_a_rank_that_left_ends_and_names_the_step(ranks: Callable[..., Any]) -> None:
    outcomes = ranks(2).outcomes(_leave_early)
    assert isinstance(outcomes[1].error, ValueError)
    error = outcomes[0].error
    assert isinstance(error, DeadlineExceeded), error
    assert (error.rank, error.step, error.seconds) == (0, 2, 1.0)


def _stop_on(rank: int, begin: str = "", **words: Any) -> tuple[int, int]:
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            if begin == "training" and trainer.world.rank == rank:
                self.model.stop_training = True

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if begin == "epoch" and trainer.world.rank == rank:
                self.model.stop_training = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and trainer.world.rank == rank:
                self.model.stop_training = True

    with make_trainer((Stop(),), trainer__epochs=5, **words) as trainer:
        trainer.fit(small_model, vectors())
        return trainer.progress.step, trainer.progress.epoch


def test_one_rank_that_stops_stops_all_at_that_step(ranks: Callable[..., Any]) -> None:
    assert ranks(3).run(_stop_on, 1) == [(3, 0)] * 3
    assert ranks(3).run(_stop_on, 1, begin="epoch") == [(1, 0)] * 3
    assert ranks(3).run(_stop_on, 1, begin="training") == [(1, 0)] * 3
    assert ranks(3).run(_stop_on, 1, begin="training", trainer__max_time="1h") == [(1, 0)] * 3


def test_a_stop_of_one_rank_is_in_the_checkpoint_of_its_step(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """As where all are killed before they have told one another."""
    words = {"checkpoint__every": "1ba", "checkpoint__keep": 9, "run__dir": str(tmp_path)}
    assert ranks(2).run(_stop_on, 1, **words) == [(3, 0)] * 2
    (third,) = [e.path for e in Store(tmp_path / "checkpoints").entries() if e.step == 3]
    words |= {"run__dir": str(tmp_path / "again"), "checkpoint__resume": str(third)}
    assert ranks(2).run(_stop_on, 1, **words) == [(3, 0)] * 2


def _nan_on(rank: int) -> tuple[int, bool]:
    x, y = vectors()
    x = x.copy()
    x[64 + 1] = np.nan  # in the slice of rank 0 of the third batch
    with make_trainer(data__shuffle="false", trainer__epochs=3) as trainer:
        trainer.fit(small_model, (x, y))
        return trainer.progress.step, bool(np.isfinite(x[:64]).all())


def test_a_nan_on_one_rank_stops_all_at_that_step(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_nan_on, 0) == [(3, True)] * 2


def _overflow_on_one_rank(accumulate: int) -> tuple[float, int, bytes]:
    """mixed_float16 with one example that overflows in the second update, on one rank only."""
    x, y = vectors()
    x = x.copy()
    x[32 * accumulate + 1] = 6e4
    with make_trainer(
        trainer__precision="mixed_float16",
        data__shuffle="false",
        health__nan="ignore",
        trainer__max_steps=3,
        trainer__accumulate=accumulate,
    ) as trainer:
        trainer.fit(small_model, (x, y))
        optimizer = trainer.model.optimizer
        scale = float(optimizer.dynamic_scale.numpy())
        return scale, int(optimizer.iterations.numpy()), weights_of(trainer.model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_skip_an_overflow_together(ranks: Callable[..., Any], accumulate: int) -> None:
    outcomes = ranks(2).run(_overflow_on_one_rank, accumulate)
    assert outcomes[0] == outcomes[1]
    scale, updates, _ = outcomes[0]
    assert (scale, updates) == (2.0**14, 2)  # halved once, and that step left out


def _no_data() -> None:
    with make_trainer() as trainer:
        trainer.fit(small_model, (np.zeros((0, 8)), np.zeros((0,), int)))


def test_no_data_is_an_error_on_every_rank(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_no_data):
        assert isinstance(outcome.error, DataError), outcome


def _random_layers(seed: int) -> tuple[bytes, bytes]:
    """A model with dropout and plain BatchNorm: the rank's own mask, and the weights."""
    import keras

    class Mask(keras.layers.Layer):
        """Keeps what its dropout did to a row of ones, of this rank only."""

        def __init__(self) -> None:
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5)

        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(
                shape=(8,), initializer="zeros", trainable=False, dtype="int32"
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                kept = self.dropout(keras.ops.ones_like(x), training=True)
                self.seen.assign(keras.ops.cast(kept[0] > 0, "int32"))
                return x * kept
            return x

    with make_trainer(trainer__epochs=2, seed=seed, health__audit_every="null") as trainer:
        mask = Mask()
        model = small_model(8, (keras.layers.BatchNormalization(), mask))
        trainer.fit(model, vectors())
        shared = [v for v in model.variables if v is not mask.seen]
        return mask.seen.numpy().tobytes(), b"".join(v.numpy().tobytes() for v in shared)


@pytest.mark.exhaustive
def test_dropout_differs_and_weights_do_not(ranks: Callable[..., Any]) -> None:
    """What cannot equal one process is equal on all ranks, and the same in every run."""
    first = ranks(3).run(_random_layers, 5)
    assert len({mask for mask, _ in first}) == 3
    assert len({weights for _, weights in first}) == 1
    assert ranks(3).run(_random_layers, 5) == first


def _per_worker(size_each: int, engine: str) -> tuple[int, bytes]:
    """Each rank's own data, of different lengths: 10, 7 and no batches."""
    import tensorflow as tf

    with make_trainer(
        data__batch="per_worker", backend__engine=engine, world__deadline=20
    ) as trainer:
        x, y = vectors()
        count = [10, 7, 0][trainer.world.rank] * size_each
        data = tf.data.Dataset.from_tensor_slices((x, y)).take(count).batch(size_each)
        trainer.fit(small_model, data)
        return trainer.progress.examples, weights_of(trainer.model)


@pytest.mark.quick("mpi")
@pytest.mark.parametrize("engine", ENGINES)
def test_uneven_data_of_ranks_is_used_up_without_waiting(
    ranks: Callable[..., Any], engine: str
) -> None:
    outcomes = ranks(3, group_mode(engine)).run(_per_worker, 4, engine)
    assert [examples for examples, _ in outcomes] == [68] * 3
    assert len({weights for _, weights in outcomes}) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_hides_its_update_is_refused(ranks: Callable[..., Any], engine: str) -> None:
    group = ranks(2, group_mode(engine))
    for outcome in group.outcomes(_hidden_update, engine):
        assert isinstance(outcome.error, ModelError), outcome
        assert "cannot be summed over ranks" in str(outcome.error)


def _hidden_update(engine: str) -> None:
    import keras
    import tensorflow as tf

    class ByHand(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            for v, g in zip(
                self.trainable_variables,
                tape.gradient(loss, self.trainable_variables),
                strict=True,
            ):
                v.assign_sub(0.1 * g)
            return {"loss": loss}

    model = ByHand()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with make_trainer(backend__engine=engine) as trainer:
        trainer.fit(model, vectors())


def _predicted(shard: str) -> tuple[Any, Any]:
    """Predictions of a model that gives its inputs back, dealt out or not."""
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    x = np.arange(22.0, dtype="float32")[:, None]
    with make_trainer(data__shard=shard) as trainer:
        return trainer.predict(model, tf.data.Dataset.from_tensor_slices(x).batch(4)), x


def test_predictions_come_in_the_order_of_the_data(ranks: Callable[..., Any]) -> None:
    for shard in ("batch", "element"):
        for predicted, expected in ranks(3).run(_predicted, shard):
            np.testing.assert_array_equal(predicted, expected)


def _noise() -> Any:
    import keras
    import tensorflow as tf

    class Noise(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: Any) -> Any:
            kinds = [
                keras.random.normal(tf.shape(x), seed=self.seeds),
                tf.random.normal(tf.shape(x)),
            ]
            return tf.concat([x, *kinds], -1)

    model = keras.Sequential([keras.Input((1,)), Noise()])
    with make_trainer() as trainer:
        return trainer.predict(model, np.zeros((24, 1)), batch_size=8)


def test_ranks_predict_with_noise_of_their_own(ranks: Callable[..., Any]) -> None:
    one, other = ranks(2).run(_noise)
    np.testing.assert_array_equal(one, other)
    for column in (1, 2):
        assert len(np.unique(one[:, column])) == 24


def _synchronized_under_xla() -> None:
    import keras

    extra = (keras.layers.BatchNormalization(synchronized=True),)
    with make_trainer(trainer__xla="true", trainer__accumulate=2) as trainer:
        trainer.fit(small_model(8, extra), vectors())


def test_xla_refuses_to_communicate_in_a_forward_pass_of_several(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(_synchronized_under_xla):
        assert isinstance(outcome.error, ModelError), outcome
        assert "trainer.xla=false" in str(outcome.error)


def _in_bfloat16(engine: str) -> bytes:
    import keras

    dense = keras.layers.Dense(8, dtype="bfloat16")
    with make_trainer(backend__engine=engine) as trainer:
        trainer.fit(small_model(8, (dense,)), vectors())
        return weights_of(trainer.model)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_in_bfloat16(ranks: Callable[..., Any], engine: str) -> None:
    first, second = ranks(2, group_mode(engine)).run(_in_bfloat16, engine)
    assert first == second
