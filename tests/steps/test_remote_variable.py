"""A variable of another stage has a shape and a name, and reading it says where it is."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common.stateless_scope import StatelessScope

from ktrainer.errors import ModelError
from ktrainer.steps.remote_variable import RemoteVariable, is_remote, make_remote

SAYS = (
    r"the model is cut into stages.*variable there is on stage 2.*trainer\.predict.*trainer\.save"
)


def initialised() -> Any:
    return keras.Variable(np.ones((2, 3), "float32"), name="there")


def waiting() -> Any:
    with StatelessScope():
        return keras.Variable("ones", (2, 3), name="there")


@pytest.fixture(params=[initialised, waiting])
def variable(request: pytest.FixtureRequest) -> Any:
    variable = request.param()
    make_remote(variable, 2)
    return variable


ZERO = np.zeros((2, 3), "float32")
USES = {
    "value": lambda v: v.value,
    "numpy": lambda v: v.numpy(),
    "array": np.asarray,
    "tensor": tf.convert_to_tensor,
    "operator": lambda v: v + 1,
    "operation": keras.ops.sum,
    "item": lambda v: v[0],
    "handle": lambda v: v.handle,
    "assign": lambda v: v.assign(ZERO),
    "assign_add": lambda v: v.assign_add(ZERO),
    "assign_sub": lambda v: v.assign_sub(ZERO),
    "optimizer": lambda v: keras.optimizers.SGD().apply([tf.zeros((2, 3))], [v]),
    "initialise": lambda v: v._deferred_initialize(),
    "compiled": lambda v: tf.function(lambda: v + 1)(),
}


def test_every_use_says_where_it_is(variable: Any) -> None:
    for use in USES.values():
        with pytest.raises(ModelError, match=SAYS):
            use(variable)


def test_what_is_known_everywhere(variable: Any) -> None:
    assert tuple(variable.shape) == (2, 3)
    assert (variable.dtype, variable.name, variable.path) == ("float32", "there", "there")
    assert repr(variable) == "<Variable path=there, shape=(2, 3), dtype=float32>"
    assert is_remote(variable).partition == 2
    assert is_remote(initialised()) is None
    assert is_remote(tf.Variable(1.0)) is None


def test_a_fetched_value_can_be_read_alone(variable: Any) -> None:
    away = is_remote(variable)
    away.fetched = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(variable.numpy(), away.fetched)
    np.testing.assert_array_equal(np.asarray(variable), away.fetched)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), away.fetched)
    assert float(keras.ops.sum(variable)) == 15
    with pytest.raises(ModelError, match=SAYS):
        variable.assign(ZERO)
    away.fetched = None
    with pytest.raises(ModelError, match=SAYS):
        variable.numpy()


def test_a_fetched_value_keeps_its_type() -> None:
    for dtype in ("bfloat16", "int64", "bool", "float64"):
        variable = keras.Variable(np.ones((2,)).astype("bool"), dtype=dtype, name="there")
        before = variable.numpy()
        make_remote(variable, 0)
        is_remote(variable).fetched = before
        assert variable.numpy().dtype == before.dtype
        assert variable.numpy().tobytes() == before.tobytes()


def test_it_is_not_made_with_those_that_wait() -> None:
    first, second, third = waiting(), waiting(), waiting()
    make_remote(second, 1)
    from keras.src.backend.common.variables import initialize_all_variables

    initialize_all_variables()
    assert first.numpy().sum() == third.numpy().sum() == 6
    with pytest.raises(ModelError, match="stage 1"):
        second.numpy()


def test_shapes_are_inferred_without_values() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    for variable in model.layers[0].variables:
        make_remote(variable, 1)
    assert model(keras.Input((4,))).shape == (None, 2)
    with pytest.raises(ModelError, match=r"dense.*/(kernel|bias) is on stage 1"):
        model(np.ones((1, 4)))


def test_a_wrong_shape_is_told_as_ever(variable: Any) -> None:
    with pytest.raises(ValueError, match="must match"):
        variable.assign(np.zeros(5))


def test_called_on_its_own() -> None:
    with pytest.raises(ModelError, match="variable w is on stage 0"):
        RemoteVariable(0, "w")((2,))
