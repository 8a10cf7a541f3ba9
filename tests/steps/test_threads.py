"""While a step is traced, other threads find Keras and TensorFlow as they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.backends.tf_distribute.replicas.replica_scopes import (
    ReplicaContexts,
    with_settings_of_this_thread,
)
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext, current_step


def draw() -> list[Any]:
    """What a data source may do: draw, count, assign."""
    mean = keras.metrics.Mean()
    mean.update_state([1.0, 2.0], sample_weight=[1.0, 3.0])
    variable = keras.Variable(1.0)
    variable.assign(variable + 1)
    seed = keras.random.SeedGenerator(5).next()
    return [*np.asarray(seed), float(mean.result()), float(variable)]


def in_another_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def context_of_rank(rank: int) -> StepContext:
    return StepContext(tf.constant(0.5, tf.float64), rank=rank)


def test_data_beside_the_step_of_a_rank() -> None:
    truth, context = draw(), context_of_rank(1)
    with keras_patches(context):
        assert in_another_thread(draw) == truth
        assert not context.assigned
        assert in_another_thread(current_step) is None
        assert current_step() is context
        assert draw()[:2] != truth[:2]  # this thread is the step's
    assert context.assigned


def test_data_beside_the_steps_of_replicas() -> None:
    truth, contexts = draw(), ReplicaContexts(lambda value: value)
    context = context_of_rank(1)

    def on_replica() -> Any:
        assert current_step() is contexts
        with pytest.raises(LookupError, match="no replica"):
            contexts.weight  # noqa: B018
        with contexts.entered(context):
            return draw()

    with keras_patches(contexts):  # type: ignore[arg-type]
        assert in_another_thread(draw) == truth
        assert in_another_thread(with_settings_of_this_thread(on_replica))[:2] != truth[:2]
    assert context.assigned
