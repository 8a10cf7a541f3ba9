"""Variables that stay a rank's own, against the same steps in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dataparallel.helpers import caught, started
from tests.dist.small import more

STEPS, RATE = 3, 0.1


def _rows(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    return random.normal(size=(STEPS, 4, 3)), random.normal(size=(STEPS, 4, 1))


def _by_hand(size: int, scale: bool) -> list[list[np.ndarray]]:
    """x A b on each rank: A is shared, b each rank's own; (A, b) of each rank at the end."""
    shared = np.full((3, 2), 0.5)
    local = [np.array([[1.0], [rank + 1.0]]) for rank in range(size)]
    data = [_rows(rank) for rank in range(size)]
    for step in range(STEPS):
        gradients = []
        for rank, (x, y) in enumerate(data):
            error = 2 * (x[step] @ shared @ local[rank] - y[step]) / len(y[step])
            gradients.append(x[step].T @ error @ local[rank].T)
            mine = (x[step] @ shared).T @ error
            local[rank] = local[rank] - RATE * mine / (size if scale else 1)
        shared = shared - RATE * np.mean(gradients, 0)
    return [[shared, own] for own in local]


def _model(rank: int) -> Any:
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    layers = [keras.layers.Dense(2, use_bias=False), keras.layers.Dense(1, use_bias=False)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.set_weights([np.full((3, 2), 0.5), np.array([[1.0], [rank + 1.0]])])
    return model


def _trained(how: str, scale: bool, eager: bool) -> list[np.ndarray]:
    import keras
    import tensorflow as tf

    with started() as hvd:
        model, optimizer = _model(hvd.rank()), keras.optimizers.SGD(RATE)
        own = model.layers[-1]
        options = {"local_layers": own, "scale_local_gradients": scale}
        if how == "optimizer":
            optimizer = hvd.PartialDistributedOptimizer(optimizer, **options)
        elif how == "passes":  # the same batch twice, averaged
            optimizer = hvd.PartialDistributedOptimizer(
                optimizer,
                backward_passes_per_step=2,
                average_aggregated_gradients=True,
                **options,
            )
        elif how == "registered":
            optimizer = hvd.DistributedOptimizer(optimizer, scale_local_gradients=scale)
            optimizer.register_local_var(own.kernel)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            if how == "tape":
                tape = hvd.PartialDistributedGradientTape(tape, **options)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        run = step if eager else tf.function(step)
        for x, y in zip(*_rows(hvd.rank()), strict=True):
            for _ in range(2 if how == "passes" else 1):
                run(x, y)
        return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("size", [2, more(3)])
@pytest.mark.parametrize("how", ["tape", "optimizer", "passes", "registered"])
@pytest.mark.parametrize(("scale", "eager"), [(True, False), (False, True)])
def test_local_layers_are_each_ranks_own(
    ranks: Callable[..., Any], size: int, how: str, scale: bool, eager: bool
) -> None:
    wanted = _by_hand(size, scale)
    for found, exact in zip(ranks(size).run(_trained, how, scale, eager), wanted, strict=True):
        for value, want in zip(found, exact, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-12, atol=1e-12)


def _pieces() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    found: dict[str, Any] = {}
    with started() as hvd:
        rank, model = hvd.rank(), _model(hvd.rank())
        table, shared = tf.Variable(tf.ones([3, 1])), tf.Variable(2.0)
        with tf.GradientTape() as tape:
            loss = (rank + 1) * (tf.reduce_sum(tf.gather(table, [rank])) + shared)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(table)
        ((_, slices),), ((_, reduced),) = tape.get_local_and_global_gradients(loss, [table, shared])
        found["slices"] = [slices.values.numpy().tolist(), slices.indices.numpy().tolist()]
        found["reduced"] = float(reduced)
        optimizer = keras.optimizers.SGD(0.0, momentum=1.0)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.register_local_var(model.layers[-1].kernel)
        optimizer.build(model.trainable_variables)  # as a loop that was restored has it
        for slot in optimizer.momentums:
            slot.assign(np.full(slot.shape, float(rank)))
        model.layers[0].kernel.assign(np.full((3, 2), float(rank)))
        x, y = (rows[0] for rows in _rows(rank))
        model.fit(x, y, verbose=0, callbacks=[callback])
        found["weights"] = [v.numpy() for v in model.trainable_variables]
        found["slots"] = [float(slot.numpy().ravel()[0]) for slot in optimizer.momentums]
        gradients, variables = [tf.ones([3, 2]), tf.ones([2, 1])], model.trainable_variables
        for name, optimizer in (
            ("clip", keras.optimizers.SGD(global_clipnorm=1.0)),
            ("scale", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        ):
            partial = hvd.PartialDistributedOptimizer(optimizer, local_layers=[model.layers[-1]])
            found[name] = caught(lambda o=partial: o.apply(gradients, variables))
        make = hvd.PartialDistributedGradientTape
        for name, optimizer in (
            ("tape clip", keras.optimizers.SGD(global_clipnorm=1.0)),
            ("tape scale", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))),
            ("tape plain", keras.optimizers.SGD(0.0, clipnorm=1.0)),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            tape = make(tape, local_layers=model.layers[-1])
            gradients = tape.gradient(loss, variables)
            found[name] = caught(
                lambda o=optimizer, g=gradients: o.apply_gradients(zip(g, variables, strict=True))
            )
        # A rank's own alone may be clipped by their norm.
        last, own = gradients[-1:], variables[-1:]
        found["own"] = caught(lambda: keras.optimizers.SGD(global_clipnorm=1.0).apply(last, own))
        new = keras.layers.Dense(1)
        found["unbuilt"] = caught(lambda: make(tf.GradientTape(), local_layers=new))
        found["no layer"] = caught(lambda: make(tf.GradientTape(), local_layers=["dense"]))
    return found


def test_sources_callbacks_and_what_is_refused(ranks: Callable[..., Any]) -> None:
    for rank, found in enumerate(ranks(2).run(_pieces)):
        assert found["slices"] == [[[(rank + 1) / 2]], [rank]]
        assert found["reduced"] == 1.5
        first, last = found["weights"]
        np.testing.assert_array_equal(first, np.zeros((3, 2)))
        np.testing.assert_array_equal(last, [[1.0 + rank], [rank + 1.0 + rank]])  # plus its slot
        assert found["slots"] == [0.0, float(rank)]
        assert "use clipnorm or clipvalue" in found["clip"]
        assert "LossScaleOptimizer skips updates" in found["scale"]
        assert "use clipnorm or clipvalue" in found["tape clip"]
        assert "LossScaleOptimizer skips updates" in found["tape scale"]
        assert not found["tape plain"]
        assert not found["own"]
        assert "is not built" in found["unbuilt"]
        assert "is no keras.layers.Layer" in found["no layer"]
