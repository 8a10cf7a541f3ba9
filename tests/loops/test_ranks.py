"""What a loop of the user's own meets on several ranks: other weights, other data, lost ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dist.harness import RankError
from tests.loops.cases import BATCH, classifier, data
from tests.tf_distribute.running import ONE_PROCESS
from tests.tf_distribute.test_features import trainer


def rows_of_batches(rows: int) -> list[list[int]]:
    """The numbers that this rank gets, by eager loops and by one in a function; then all sizes."""
    import tensorflow as tf

    with trainer("data_parallel") as it:
        dataset = it.distribute(tf.data.Dataset.range(rows).batch(BATCH))
        found = [part.numpy().tolist() for part in dataset]
        iterator = iter(dataset)
        assert next(iterator).numpy().tolist() == found[0]
        sizes = tf.TensorArray(tf.int64, 0, dynamic_size=True, infer_shape=False)

        @tf.function
        def looped(sizes: Any) -> Any:
            for part in dataset:
                sizes = sizes.write(sizes.size(), it.reduce("sum", tf.shape(part, tf.int64)[0]))
            return sizes.stack()

        assert looped(sizes).numpy().tolist() == [BATCH] * (rows // BATCH) + [rows % BATCH]
        return found


def test_each_rank_has_its_rows_of_every_batch(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(3).run(rows_of_batches, 2 * BATCH + 2)
    assert [len(parts) for parts in by_rank] == [3, 3, 3]
    joined = [row for parts in zip(*by_rank, strict=True) for part in parts for row in part]
    assert joined == list(range(2 * BATCH + 2))
    assert by_rank[2][2] == []


def weights_after_a_step(update: bool) -> Any:
    """Weights that ranks have initialised differently."""
    import keras
    import tensorflow as tf

    with trainer("data_parallel") as it:
        keras.utils.set_random_seed(it.world.rank)
        first = it.world.step
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(x))) / BATCH
            if update:
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        for part in it.distribute(tf.data.Dataset.from_tensor_slices(data()[0]).batch(BATCH)):
            it.run(step, part)
        assert it.world.step == first + 3
        return [np.array(v.numpy()).tolist() for v in [*model.variables, *optimizer.variables]]


def test_the_first_update_starts_from_the_weights_of_rank_0(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(weights_after_a_step, True)
    assert first == second
    first, second = ranks(2).run(weights_after_a_step, False)  # nothing to be made equal
    assert first != second


def different_data(known: bool) -> None:
    import tensorflow as tf

    with trainer("data_parallel") as it:
        x, y = data()
        y[BATCH - 1] += it.world.rank
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = dataset if known else dataset.filter(lambda x, y: True)
        for batch in it.distribute(dataset.batch(BATCH)):
            it.run(lambda x, y: tf.reduce_sum(x), *batch)


def fewer_batches(known: bool) -> None:
    import tensorflow as tf

    with trainer("data_parallel") as it:
        dataset = tf.data.Dataset.range(32 - it.world.rank)
        dataset = dataset if known else dataset.filter(lambda _: True)
        for batch in it.distribute(dataset.batch(1)):
            it.run(tf.reduce_sum, batch)


@pytest.mark.parametrize(
    ("run", "known", "message"),
    [
        (different_data, True, r"batch 0 of this pass differs in y: rank 1 got other values"),
        (different_data, False, r"batch 0 of this pass differs in y: rank 1 got other values"),
        (fewer_batches, True, r"length: rank 0: 32 batches; rank 1: 31 batches"),
        (fewer_batches, False, r"rank 1 ran out of data after 31 batches, rank 0 did not"),
    ],
)
def test_data_that_differ_are_named(
    ranks: Callable[..., Any], run: Any, known: bool, message: str
) -> None:
    with pytest.raises(RankError, match=f"DivergenceError[\\s\\S]*{message}"):
        ranks(2).run(run, known)


def unclear_rows() -> tuple[str, str, float, list[str]]:
    """Results of one element a row; a constant among the arguments; then a step as it should be;
    and an empty constant alone."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import DeadlineExceeded, ModelError

    with trainer("data_parallel", world__deadline=3) as it:
        rows = tf.data.Dataset.from_tensor_slices(np.arange(7.0)[:, None])
        (part,) = it.distribute(rows.batch(7))
        shapes = statistics = ""
        try:
            it.reduce("sum", it.run(lambda x: tf.reduce_sum(x, 1), part))
        except ModelError as error:
            shapes = str(error)
        total = float(it.reduce("sum", it.run(tf.reduce_sum, part)))
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))

        def step(constant: Any, x: Any) -> None:
            layer(x * tf.reduce_sum(constant), training=True)

        try:
            it.run(step, tf.ones([2], tf.float64), part)
        except (ModelError, DeadlineExceeded) as error:
            statistics = f"{type(error).__name__}: {error}"
        weight, optimizer = keras.Variable(2.0), keras.optimizers.SGD(1.0)
        optimizer.build([weight])

        def train(empty: Any) -> None:
            optimizer.apply([2 * weight + tf.reduce_sum(empty)], [weight])

        def normalise(empty: Any) -> None:
            layer(tf.ones([2, 1]) + tf.reduce_sum(empty), training=True)

        nothing = []
        for each in (train, normalise):
            try:
                it.run(each, tf.zeros([0], weight.dtype))
            except (ModelError, DeadlineExceeded) as error:
                nothing.append(f"{type(error).__name__}: {error}")
    return shapes, statistics, total, nothing


@pytest.mark.exhaustive
def test_what_is_no_row_is_never_counted_as_one(ranks: Callable[..., Any]) -> None:
    for shapes, statistics, total, nothing in ranks(2, "ends").run(unclear_rows):
        assert "ranks have results of different shapes" in shapes
        assert total == 21
        assert "arguments of trainer.run have different numbers of rows" in statistics
        assert len(nothing) == 2
        assert all("no rank has any rows of what trainer.run was given" in each for each in nothing)


def late(seconds: float) -> str:
    import tensorflow as tf

    from ktrainer.errors import DeadlineExceeded

    with trainer("data_parallel", world__deadline=1) as it:
        it.world.step = 0
        value = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        it.run(lambda: value.assign_add(1.0))
        assert float(value) == it.world.size
        if it.world.rank == 1:
            time.sleep(seconds)
            return ""
        try:
            it.run(lambda: value.assign_add(2.0))
        except DeadlineExceeded as error:
            return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named(ranks: Callable[..., Any]) -> None:
    said, _ = ranks(2).run(late, 4.0)
    assert "step 2" in said
    assert "all-reduce" in said
    assert "rank 1" in said


def refused(name: str) -> str:
    from ktrainer.errors import ConfigError, DataError

    words = {"data__shard": "element"} if name == "shard" else {}
    with trainer("pipeline" if name == "run" else "data_parallel", **words) as it:
        import tensorflow as tf

        calls: dict[str, Callable[[], Any]] = {
            "run": lambda: it.run(lambda: None),
            "strategy": lambda: it.strategy,
            "shard": lambda: it.distribute(tf.data.Dataset.range(4).batch(2)),
            "rows": lambda: it.distribute(tf.data.Dataset.range(4)),
            "arrays": lambda: it.distribute(np.zeros(4)),
            "text": lambda: it.reduce("sum", tf.constant("a")),
        }
        try:
            calls[name]()
        except (ConfigError, DataError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run", "Let trainer.fit run the steps"),
        ("strategy", "trainer.world.replicas"),
        ("shard", "Set data.shard=batch"),
        ("rows", "end it with `.batch(batch_size)`"),
        ("arrays", "takes a tf.data.Dataset"),
        ("text", "sums numbers, not string"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(
    ranks: Callable[..., Any], name: str, message: str
) -> None:
    for said in ranks(2).run(refused, name):
        assert message in said


def scheduled(backend: str) -> Any:
    import keras
    import tensorflow as tf

    with trainer(backend) as it:
        seen = keras.metrics.Sum()

        def step(x: Any) -> Any:
            seen.update_state(x)
            return {"sum": tf.reduce_sum(x), "rows": tf.shape(x)[0]}

        for part in it.distribute(tf.data.Dataset.range(10).batch(4)):
            it.schedule(step, part)
        results = [{key: int(value) for key, value in each.items()} for each in it.join()]
        assert it.join() == []
        it.schedule(lambda: None)
        assert it.join() == [None]
        return results, int(seen.result())


def test_scheduled_steps_are_joined(ranks: Callable[..., Any]) -> None:
    expected = [{"sum": s, "rows": n} for s, n in ((6, 4), (22, 4), (17, 2))], 45
    assert ranks(2).run(scheduled, "data_parallel") == [expected] * 2
    assert ranks(1, ONE_PROCESS).run(scheduled, "local") == [expected]
