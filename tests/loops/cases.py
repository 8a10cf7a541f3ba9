"""Training loops of a user's own, written once, for all backends to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.tf_distribute.test_features import trainer

ROWS, BATCH = 33, 16  # the last batch has one row: other ranks have none


class Outcome(NamedTuple):
    """Numbers that a loop has printed, and values of variables."""

    numbers: list[float]
    variables: list[np.ndarray]


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 8))
    return x, (x @ random.normal(size=(8, 3))).argmax(-1)


def batches(it: Any, *, shuffled: bool = True, rows: int = ROWS) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(data(rows))
    if shuffled:
        dataset = dataset.shuffle(rows)
    return it.distribute(dataset.batch(BATCH))


def classifier(*layers: Any, **dense: Any) -> Any:
    import keras

    first = keras.layers.Dense(6, "tanh", **dense)
    return keras.Sequential([keras.Input((8,)), first, *layers, keras.layers.Dense(3)])


def values(*owners: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for owner in owners for v in owner.variables]


def row_counter() -> Any:
    """A metric with a state that is an integer."""
    import keras

    class Rows(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.rows = self.add_variable((), "zeros", dtype="int64")

        def update_state(self, x: Any) -> None:
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))

        def result(self) -> Any:
            return self.rows

    return Rows()


def clipped(it: Any) -> Outcome:
    """A sum divided by the global batch, clipping of both kinds, and metrics inside of the step."""
    import keras
    import tensorflow as tf

    with it.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        optimizer.build(model.trainable_variables)
        mean, by_row = keras.metrics.Mean("loss"), keras.metrics.Mean("by_row")
        right = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = loss_of(y, logits)
            loss = tf.reduce_sum(losses) / BATCH
        weights = model.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.2)
        optimizer.apply(gradients, weights)
        mean.update_state(loss)
        by_row.update_state(losses)
        right.update_state(y, logits)
        return {"loss": loss, "rows": tf.shape(x)[0], "norm": norm}

    numbers = []
    dataset = batches(it)
    for _ in range(2):
        for metric in (mean, by_row, right):
            metric.reset_state()
        for batch in dataset:
            of_replicas = it.run(step, *batch)
            found = it.reduce("sum", of_replicas)
            numbers += [float(found["loss"]), float(found["rows"])]
            numbers.append(float(it.reduce("mean", of_replicas["norm"])))
        numbers += [float(metric.result()) for metric in (mean, by_row, right)]
    return Outcome(numbers, values(model, optimizer, mean, by_row, right))


def regularized(it: Any) -> Outcome:
    """Losses that TensorFlow and Keras average, penalties, and synchronized statistics."""
    import keras
    import tensorflow as tf

    with it.scope():
        normalized = keras.layers.BatchNormalization(synchronized=True)
        model = classifier(normalized, kernel_regularizer=keras.regularizers.L2(0.05))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        added, rows = keras.metrics.Sum(), row_counter()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    unreduced = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits) + tf.nn.compute_average_loss(unreduced(y, logits))
            loss += tf.nn.scale_regularization_loss(sum(model.losses))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        added.reset_state()
        added.update_state(tf.reduce_sum(x, 1))
        rows.update_state(x)
        return loss

    numbers = []
    for batch in batches(it):
        numbers.append(float(it.reduce("sum", it.run(step, *batch))))
        numbers.append(float(added.result()))
    return Outcome(numbers, values(model, optimizer, rows))


def adversarial(it: Any) -> Outcome:
    """Two optimizers in a step, and losses of vectors."""
    import keras
    import tensorflow as tf

    with it.scope():
        maker = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        judge = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01, clipvalue=0.02)
        for optimizer, model in zip(optimizers, (maker, judge), strict=True):
            optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            made, real = judge(maker(x[:, ::-1])), judge(x)
            making = loss_of(tf.ones_like(made), made) / BATCH
            judging = loss_of(tf.ones_like(real), real) + loss_of(tf.zeros_like(made), made)
            judging = tf.reduce_sum(judging) / BATCH
        for optimizer, model, loss in zip(
            optimizers, (maker, judge), (making, judging), strict=True
        ):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return tf.reduce_sum(making), judging

    numbers = []
    for batch in batches(it):
        numbers += [float(loss) for loss in it.reduce("sum", it.run(step, *batch))]
    return Outcome(numbers, values(maker, judge, *optimizers))


def looked_up(it: Any) -> Outcome:
    """A table whose gradients are slices, in a loop of the step's own, and a rate that decays."""
    import keras
    import tensorflow as tf

    with it.scope():
        table = keras.layers.Embedding(5, 3)
        table.build()
        rows = row_counter()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(table.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            total = tf.zeros([], tf.float64)
            for _ in tf.range(2):
                total += tf.reduce_sum(tf.square(table(y) - x[:, :3])) / BATCH
        optimizer.learning_rate.assign(0.05 / tf.cast(1 + optimizer.iterations, tf.float64))
        weights = table.trainable_variables
        gradients = [tf.clip_by_norm(g, 0.3) for g in tape.gradient(total, weights)]
        optimizer.apply(gradients, weights)
        rows.update_state(y)
        return total

    numbers = [float(it.reduce("sum", it.run(step, *batch))) for batch in batches(it)]
    return Outcome(numbers, values(table, optimizer, rows))


def in_branches(it: Any) -> Outcome:
    """Updates, and metrics, in branches and loops on tensors, where replicas cannot meet."""
    import keras
    import tensorflow as tf

    with it.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        seen = keras.metrics.Sum()
        plain = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, dtype=tf.float64)

    def step(x: Any, y: Any, times: Any) -> None:
        if times > 1:
            for _ in tf.range(times):
                seen.update_state(y)
                plain.assign_add(tf.reduce_sum(x))
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(model(x))) / BATCH
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)

    numbers = []
    for times, batch in enumerate(batches(it)):
        it.run(step, *batch, tf.constant(times + 1))
        numbers += [float(seen.result()), float(plain)]
    return Outcome(numbers, values(model))


def in_functions(it: Any) -> Outcome:
    """Functions of the user's own around a step, around a loop, and around an iterator."""
    import keras
    import tensorflow as tf

    with it.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        right = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits) / BATCH
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        right.update_state(y, logits)
        return loss

    @tf.function
    def one(x: Any, y: Any) -> Any:
        return it.reduce("sum", it.run(step, x, y))

    @tf.function
    def epoch(dataset: Any) -> Any:
        total = tf.zeros([], tf.float64)
        for x, y in dataset:
            total += it.reduce("sum", it.run(step, x, y))
        return total

    @tf.function
    def some(iterator: Any) -> Any:
        total = tf.zeros([], tf.float64)
        for _ in tf.range(2):
            total += it.reduce("sum", it.run(step, *next(iterator)))
        return total

    dataset = batches(it)
    numbers = [float(one(*batch)) for batch in dataset]
    numbers += [float(epoch(dataset)), float(some(iter(dataset)))]
    iterator = iter(dataset)
    numbers.append(float(it.reduce("sum", it.run(step, *next(iterator)))))
    return Outcome([*numbers, float(right.result())], values(model, optimizer, right))


CASES: dict[str, Callable[[Any], Outcome]] = {
    case.__name__: case
    for case in (clipped, regularized, adversarial, looked_up, in_branches, in_functions)
}


def outcomes(
    backend: str, names: list[str], devices: int | None = 2, **words: Any
) -> list[Outcome]:
    """Run cases in float64."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        found = []
        for name in names:
            with trainer(backend, devices, **words) as it:
                found.append(CASES[name](it))
        return found
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def largest_difference(ours: Outcome, truth: Outcome) -> float:
    """The largest relative difference of two outcomes."""
    assert len(ours.numbers) == len(truth.numbers)
    pairs = [*zip(ours.variables, truth.variables, strict=True)]
    pairs.append((np.array(ours.numbers), np.array(truth.numbers)))
    gaps = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs if b.size]
    assert all(np.isfinite(value).all() for value, _ in pairs)
    return float(max(gaps))
