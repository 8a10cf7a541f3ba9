"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture
def double_precision() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)
