"""What a loop of the user's own meets on several ranks: other weights, other data, lost ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.harness import RankError
from tests.distributed.collectives import wait_for_files
from tests.loops.cases import BATCH, ROWS, batches, classifier, data, row_counter
from tests.tf_distribute.running import ONE_PROCESS, under
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


def accumulated(backend: str) -> list[float]:
    """Updates of gradients that steps before have added up, in variables of TensorFlow."""
    import keras
    import tensorflow as tf

    with trainer(backend) as it:
        weight, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)
        optimizer.build([weight])
        total = tf.Variable(0.0)

        def collect(x: Any) -> None:
            total.assign_add(tf.reduce_sum(tf.cast(x, tf.float32)))

        def update() -> None:
            optimizer.apply([total], [weight])
            total.assign(0.0)

        found = []
        for place, part in enumerate(it.distribute(tf.data.Dataset.range(12).batch(3))):
            it.run(collect, part)
            if place % 2:
                it.run(update)
            found.append(float(weight))
        return found


def test_what_ranks_have_accumulated_is_not_overwritten(ranks: Callable[..., Any]) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(accumulated, "local")
    assert truth == [0, -15, -15, -66]
    assert ranks(2).run(accumulated, "data_parallel") == [truth, truth]


def accumulated_gradients(backend: str, kind: str) -> list[float]:
    """The same of a tape's gradients; `kind` "at once": the last step of an update applies them,
    where rank 1 has no rows; "keras": they are added up in a variable of Keras."""
    import keras
    import tensorflow as tf

    with trainer(backend) as it:
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)
        optimizer.build([weight])
        total = keras.Variable(0.0, trainable=False) if kind == "keras" else tf.Variable(0.0)

        def collect(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(x, tf.float32)) * weight**2 / 9
            total.assign_add(tape.gradient(loss, weight))

        def update() -> None:
            optimizer.apply([total.value if kind == "keras" else total / 2.0], [weight])
            total.assign(0.0)

        def collect_and_update(x: Any) -> None:
            collect(x)
            update()

        found = []
        for place, part in enumerate(it.distribute(tf.data.Dataset.range(1, 11).batch(3))):
            ends = place % 2
            it.run(collect_and_update if ends and kind == "at once" else collect, part)
            if ends and kind == "keras":
                it.run(update)
            found.append(float(weight))
        return found


@pytest.mark.parametrize("kind", ["at once", "keras"])
def test_gradients_that_a_loop_adds_up_are_those_of_one_process(
    ranks: Callable[..., Any], kind: str
) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(accumulated_gradients, "local", kind)
    for found in ranks(2).run(accumulated_gradients, "data_parallel", kind):
        np.testing.assert_allclose(found, truth, rtol=1e-6)


def updated_by_hand(backend: str) -> tuple[list[float], list[str]]:
    """Weights that steps update without an optimizer, by gradients that they have summed, and what
    is said of others."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import ModelError

    with trainer(backend) as it:
        weight, other, average = keras.Variable(1.0), tf.Variable(1.0), tf.Variable(0.0)
        weights = [weight, other]

        def gradients(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(x, tf.float32)) * weight**2 * other / 9
            return tape.gradient(loss, weights)

        def summed(x: Any) -> None:
            found = tf.distribute.get_replica_context().all_reduce("sum", gradients(x))
            for each, gradient in zip(weights, found, strict=True):
                each.assign_sub(0.1 * gradient)
            average.assign(0.9 * average + 0.1 * weight)
            other.assign(tf.clip_by_value(other, 0.1, 5.0))

        def of_keras(x: Any) -> None:
            weight.assign_sub(0.1 * gradients(x)[0])

        def of_tensorflow(x: Any) -> None:
            other.assign_add(delta=tf.sign(gradients(x)[1]))

        def climbs(x: Any) -> None:
            up = [tf.sign(each) for each in gradients(x)]
            before = tf.identity(other)
            weight.assign_add(up[0])
            other.assign_add(up[1])
            weight.assign_sub(up[0])
            other.assign(before)

        said = []
        for part in it.distribute(tf.data.Dataset.range(1, 7).batch(3)):
            it.run(summed, part)
            if backend == "data_parallel":
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    it.run(climbs, part)
                assert all("and back" in str(each.message) for each in caught)
            for step in (of_keras, of_tensorflow) if backend == "data_parallel" else ():
                try:
                    it.run(step, part)
                except ModelError as error:
                    said.append(str(error))
        return [float(each) for each in (weight, other, average)], said


def test_weights_that_a_step_updates_by_itself(ranks: Callable[..., Any]) -> None:
    ((truth, _),) = ranks(1, ONE_PROCESS).run(updated_by_hand, "local")
    for found, said in ranks(2).run(updated_by_hand, "data_parallel"):
        assert len(said) == 4
        assert all("Apply gradients by a Keras optimizer" in each for each in said)
        np.testing.assert_allclose(found, truth, rtol=1e-6)


def assigned_before(backend: str) -> list[float]:
    """A weight that a step clips before the first update, and its average."""
    import keras
    import tensorflow as tf

    with trainer(backend) as it:
        own = 10.0 * it.world.rank
        weight, average = tf.Variable(1.0 + own), tf.Variable(2.0 + own, trainable=False)
        tracked, optimizer = keras.Variable(3.0 + own), keras.optimizers.SGD(0.1)
        optimizer.build([tracked])

        def clip() -> None:
            weight.assign(tf.clip_by_value(weight, -5.0, 5.0))
            average.assign(0.5 * average + 0.5 * tracked)

        def update(x: Any) -> None:
            gradient = tf.reduce_sum(tf.cast(x, tf.float32)) * weight * average
            optimizer.apply([gradient], [tracked])

        for part in it.distribute(tf.data.Dataset.range(6).batch(3)):
            it.run(clip)
            it.run(update, part)
        return [float(weight), float(average), float(tracked)]


def test_variables_that_a_step_assigns_begin_with_those_of_rank_0(
    ranks: Callable[..., Any],
) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(assigned_before, "local")
    for found in ranks(2).run(assigned_before, "data_parallel"):
        np.testing.assert_allclose(found, truth, rtol=1e-6)


def padded(backend: str) -> float:
    """Updates by batches that are padded to lengths of their own on each rank."""
    import keras
    import tensorflow as tf

    with trainer(backend, data__batch="per_worker", world__deadline=20) as it:
        lengths = [5, 5, 5, 7, 5, 5][it.world.rank :: it.world.size]
        rows = tf.data.Dataset.from_tensor_slices(lengths).map(lambda length: tf.ones([length]))
        weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.01)
        optimizer.build([weight])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x) * weight**2
            optimizer.apply(tape.gradient(loss, [weight]), [weight])

        for part in it.distribute(rows.padded_batch(2 // it.world.size)):
            it.run(step, part)
        return float(weight)


def test_ranks_trace_batches_of_their_own_lengths(ranks: Callable[..., Any]) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(padded, "local")
    np.testing.assert_allclose(ranks(2).run(padded, "data_parallel"), truth, rtol=1e-6)


def clipped_steps(backend: str, **words: Any) -> list[str]:
    """What a step says that computes, and one that updates."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import ConfigError

    with trainer(backend, **words) as it:
        with it.scope():
            weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(1.0)
            optimizer.build([weight])

        def update(x: Any) -> None:
            optimizer.apply_gradients([(tf.reduce_sum(x), weight)])

        said = []
        raised = set()
        for step in (tf.reduce_sum, update, update):
            try:
                it.run(step, tf.ones([2]))
                said.append("")
            except ConfigError as error:
                said.append(str(error))
                raised.add(error)
        assert len(raised) == 2
        assert float(weight) == 1
        return said


@pytest.mark.parametrize("backend", ["local", "data_parallel", "mirrored"])
def test_settings_of_updates_are_refused_where_a_step_applies(
    ranks: Callable[..., Any], backend: str
) -> None:
    words = {"trainer__clip__global_norm": 1}
    for computes, *updates in under(ranks, backend, clipped_steps, backend, **words):
        assert computes == ""
        assert len(updates) == 2
        assert all("trainer.clip.global_norm: " in said for said in updates)


def unclear_rows() -> tuple[str, str, float, list[str]]:
    """Results of one element a row; a constant among the arguments; then a step as it should be;
    and an empty constant alone."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import DeadlineExceeded, ModelError

    with trainer("data_parallel", world__deadline=20) as it:
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


def late(folder: str) -> str:
    import tensorflow as tf

    from ktrainer.errors import DeadlineExceeded

    told = Path(folder, "told")
    with trainer("data_parallel") as it:
        it.world.step = 0
        value = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        it.run(lambda: value.assign_add(1.0))
        assert float(value) == it.world.size
        it.world.deadline = 1.0
        if it.world.rank == 1:
            wait_for_files(told, seconds=30)
            return ""
        try:
            it.run(lambda: value.assign_add(2.0))
        except DeadlineExceeded as error:
            return str(error)
        finally:
            told.touch()
    return "no error"


def test_a_rank_that_does_not_come_is_named(ranks: Callable[..., Any], tmp_path: Path) -> None:
    said, _ = ranks(2).run(late, str(tmp_path))
    assert "step 2" in said
    assert "all-reduce" in said
    assert "rank 1" in said


def sums_that_are_set(backend: str) -> dict[str, list[float]]:
    """Sums that each step sets before it adds to them, and tables that it adds to by rows."""
    import keras
    import tensorflow as tf

    words = {"aggregation": tf.VariableAggregation.SUM, "dtype": tf.float64}
    zeros = {"python": 0.0, "numpy": np.zeros(()), "eager": tf.constant(0.0, tf.float64)}
    with trainer(backend) as it:
        sums = {name: tf.Variable(5.0, **words) for name in [*zeros, "added"]}
        table, rows = tf.Variable(tf.zeros([3, 2], tf.float64), **words), row_counter()
        slices = tf.Variable(tf.zeros([3], tf.float64), **words)
        more, compiled = tf.Variable(5.0, **words), row_counter()
        metrics = [
            keras.metrics.MeanIoU(8),
            keras.metrics.R2Score(),
            keras.metrics.AUC(num_thresholds=5),
            keras.metrics.F1Score(average="micro", threshold=0.5),
            keras.metrics.Precision(),
        ]
        vectors = keras.metrics.Metric(dtype="float64")
        vectors.total = vectors.add_variable((1, 2), "zeros")

        @tf.function(jit_compile=True)
        def reset_and_count(x: Any) -> None:
            compiled.reset_state()
            compiled.update_state(x)

        def step(x: Any, y: Any) -> None:
            for name, zero in zeros.items():
                sums[name].assign(zero)
                sums[name].assign_add(tf.reduce_sum(x))
            sums["added"].assign_add(delta=tf.reduce_sum(x))
            rows.reset_state()
            rows.update_state(x)
            places = tf.stack([y, y % 2], 1)
            table.scatter_nd_add(places, tf.ones([tf.shape(y)[0]], tf.float64))
            slices.scatter_sub(tf.IndexedSlices(tf.reduce_sum(x, 1), y))
            reset_and_count(x)
            vectors.total.assign_add(keras.ops.sum(x[:, :2], 0, keepdims=True))  # by tf.nn.bias_add
            before = more.read_value()
            if tf.reduce_sum(y) > -1:
                more.assign(tf.reduce_sum(x) + before + 1 - 1)
            for metric in metrics:
                metric.update_state(1 - y[:, None] % 2, tf.nn.sigmoid(x[:, :1]))

        found: dict[str, list[float]] = {name: [] for name in [*sums, "rows", "compiled"]}
        for batch in batches(it):
            it.run(step, *batch)
            counted = [("rows", rows.result()), ("compiled", compiled.result())]
            for name, value in [*sums.items(), *counted]:
                found[name].append(float(keras.ops.convert_to_numpy(value)))
        results = [round(float(metric.result()), 5) for metric in metrics]  # of float32
        return found | {
            "table": table.numpy().ravel(),
            "slices": slices.numpy(),
            "vectors": vectors.total.numpy().ravel(),
            "more": [float(more), *results],
        }


def test_sums_that_a_step_sets_are_those_of_one_process(ranks: Callable[..., Any]) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(sums_that_are_set, "local")
    assert truth["table"].sum() == ROWS
    for found in ranks(2).run(sums_that_are_set, "data_parallel"):
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def means(backend: str) -> list[tuple[str, float]]:
    import tensorflow as tf

    given = [(200, "uint8"), (-100, "int8"), (2**40 + 1, "int64"), (60000, "float16"), (2, "int32")]
    with trainer(backend) as it:
        values = [tf.constant(value, dtype) for value, dtype in given]
        found = it.reduce("mean", it.run(lambda: values))
        return [(each.dtype.name, float(each)) for each in found]


def test_means_do_not_overflow(ranks: Callable[..., Any]) -> None:
    (truth,) = ranks(1, ONE_PROCESS).run(means, "local")
    assert truth[0] == ("float64", 200)
    assert ranks(2).run(means, "data_parallel") == [truth, truth]
    assert ranks(1, ONE_PROCESS).run(means, "mirrored") == [truth]


def sums_that_are_unclear() -> list[str]:
    import keras
    import tensorflow as tf

    from ktrainer.errors import ModelError

    with trainer("data_parallel") as it:
        rows, every = row_counter(), tf.Variable(0, trainable=False)
        mean = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.MEAN)

        def resets(x: Any) -> None:
            if every % 100 == 0:
                rows.reset_state()
            rows.update_state(x)

        def slices(x: Any) -> None:
            mean[0].assign(keras.ops.sum(x))

        def scatters(x: Any) -> None:
            mean.scatter_update(tf.IndexedSlices(keras.ops.sum(x, keepdims=True), [0]))

        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        largest = keras.metrics.Sum()

        def sets(x: Any) -> None:
            total.assign(tf.reduce_sum(x))

        def decays(x: Any) -> None:
            total.assign(0.9 * total + tf.reduce_sum(x))

        def compares(x: Any) -> None:
            largest.total.assign(keras.ops.maximum(largest.total, keras.ops.max(x)))

        said = []
        for step in (resets, slices, scatters, sets, decays, compares):
            try:
                it.run(step, tf.ones([4]))
            except ModelError as error:
                said.append(str(error))
        return said


def test_sums_that_are_unclear_are_refused(ranks: Callable[..., Any]) -> None:
    for branch, *parts in ranks(2).run(sums_that_are_unclear):
        assert "Reset it outside of branches" in branch
        assert len(parts) == 5
        assert all("sets a part of Variable" in part for part in parts[:2])
        assert all("to a value that it computes" in part for part in parts[2:])


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
