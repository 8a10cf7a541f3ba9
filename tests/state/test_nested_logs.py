"""Nested logs, by path and as Keras flattens them."""

from __future__ import annotations

import numpy as np
import pytest
from keras.src.utils.python_utils import pythonify_logs

from ktrainer.state.nested_logs import (
    as_floats,
    as_keras_flattens,
    flatten_paths,
    path_name,
    unflatten_paths,
)

LOGS = {"loss": 1.0, "a": {"b": 2.0, "c": [3.0, {"d": 4.0}]}, "empty": {}, "text": "x"}


def test_leaves_and_back() -> None:
    values = flatten_paths(LOGS)
    assert values == {
        ("loss",): 1.0,
        ("a", "b"): 2.0,
        ("a", "c", 0): 3.0,
        ("a", "c", 1, "d"): 4.0,
        ("text",): "x",
    }
    assert unflatten_paths(LOGS, values) == LOGS
    assert unflatten_paths(LOGS, {("a", "c", 1, "d"): None}) == {
        "a": {"c": [None, {"d": None}]},
        "empty": {},
    }
    assert len({path_name(path) for path in [*values, ("a.b",), ("a", "b")]}) == len(values) + 1


def test_flattened_as_keras_does() -> None:
    assert as_keras_flattens(LOGS) == pythonify_logs(LOGS)
    assert as_floats({**LOGS, "array": np.ones(2)}) == {"loss": 1.0, "b": 2.0}


def test_one_name_twice_is_said() -> None:
    """And the one is kept that Keras keeps."""
    logs = {"z": {"same": 1.0}, "a": {"same": 2.0}, "m": {"deep": {"same": 3.0}}}
    with pytest.warns(
        UserWarning, match="a.same and m.deep.same and z.same .* only z.same is kept"
    ):
        assert as_keras_flattens(logs) == pythonify_logs(logs) == {"same": 1.0}
    assert as_keras_flattens(logs) == {"same": 1.0}  # said once
