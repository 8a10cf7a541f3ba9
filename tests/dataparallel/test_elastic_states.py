"""States of `elastic.run` in one process: what a commit keeps, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.errors import ConfigError, DataError, ModelError


@pytest.fixture
def hvd() -> Iterator[Any]:
    import ktrainer.dataparallel as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()


def built() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((1, 3)), training=True))
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)


def test_a_model_returns_to_its_last_commit(hvd: Any) -> None:
    model, optimizer = built()
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, seen=[1])
    step(model, optimizer)
    state.batch, kept = 3, [v.numpy() for v in [*model.variables, *optimizer.variables]]
    state.seen.append(2)
    state.commit()
    step(model, optimizer)
    optimizer.learning_rate.assign(0.5)
    state.batch = 4
    state.seen.append(3)  # of a list that the commit has a copy of
    for _ in range(2):
        state.restore()
        assert (state.batch, state.seen) == (3, [1, 2])
        found = [*model.variables, *optimizer.variables]
        for variable, value in zip(found, kept, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        state.seen.append(4)
    state.sync()  # keeps what is there now, not what was committed
    state.restore()
    assert state.seen == [1, 2, 4]


def test_run_without_healing_calls_the_function_once(hvd: Any) -> None:
    state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=2)
    calls: list[Any] = []

    @hvd.elastic.run
    def train(state: Any, more: int, *, end: int) -> int:
        calls.append((state.epoch, more))
        state.check_host_updates()
        return end

    assert train(state, 1, end=5) == 5
    assert calls == [(2, 1)]


def test_variables(hvd: Any) -> None:
    variable = tf.Variable([1.0, 2.0])
    state = hvd.elastic.TensorFlowState(variables=[variable], step=1)
    variable.assign_add([1.0, 1.0])
    variable.scatter_nd_add([[0]], [5.0])
    state.restore()
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


def test_what_is_refused(hvd: Any) -> None:
    model, optimizer = built()
    elastic = hvd.elastic
    with pytest.raises(ConfigError, match="commit: a state has this name already"):
        elastic.ObjectState(commit=1)
    with pytest.raises(ModelError, match="needs variables"):
        elastic.TensorFlowState(step=1)
    with pytest.raises(DataError, match="leave `session` out"):
        elastic.TensorFlowState([tf.Variable(1.0)], session=object())
    with pytest.raises(ModelError, match="needs its optimizer"):
        elastic.TensorFlowKerasState(model)
    with pytest.raises(ModelError, match="has no variables yet"):
        elastic.TensorFlowKerasState(model, keras.optimizers.Adam())
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    state = elastic.TensorFlowKerasState(model, optimizer)
    step(model, optimizer)
    with pytest.raises(ModelError, match="between two of backward_passes_per_step"):
        state.commit()
    step(model, optimizer)
    state.commit()


@pytest.mark.parametrize("absolute", [False, True])
def test_epochs_that_are_counted(hvd: Any, absolute: bool) -> None:
    """Whatever comes first in the list of callbacks, a commit has what the others count."""
    model, optimizer = built()
    model.compile(optimizer, "mse")
    state = hvd.elastic.KerasState(model, epoch=3, batch=0)
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    committed: list[tuple[int, int]] = []
    state.commit = lambda: committed.append((state.epoch, state.batch))
    epochs = {"epochs": 5, "initial_epoch": 3} if absolute else {"epochs": 2}
    model.fit(np.ones((3, 3)), np.ones((3, 2)), 1, verbose=0, callbacks=callbacks, **epochs)
    assert committed == [(3, 1), (4, 0), (4, 0), (4, 2), (5, 0)]
    assert not state.updaters
