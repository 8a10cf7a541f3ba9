"""Datasets that ops make of others: the elements, specs and states of `Dataset.map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from ktrainer.data.dataset_iterator import elements, set_state, state_of
from ktrainer.data.dataset_source import DatasetSource
from ktrainer.data.derived_dataset import DerivedDataset, mapped
from ktrainer.data.stage_times import _functions as names_of_maps
from ktrainer.distributed import SingleWorld

_ROWS = 7
_X = np.arange(3.0 * _ROWS, dtype=np.float32).reshape(_ROWS, 3)
_DTYPES = [
    *("float16", "bfloat16", "float64", "complex64", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


class Pair(NamedTuple):
    x: Any
    y: Any


def of_dtype(name: str) -> tf.Tensor:
    numbers = tf.range(_ROWS)
    return tf.strings.as_string(numbers) if name == "string" else tf.cast(numbers, name)


def second_rows(*parts: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf[1:2], parts), tf.shape(parts[0])


def same(one: tf.data.Dataset, other: tf.data.Dataset) -> None:
    assert one.element_spec == other.element_spec
    assert one.cardinality() == other.cardinality() > 0
    for ours, theirs in zip(elements(one).values, other, strict=True):
        tf.nest.assert_same_structure(ours, theirs)
        for ours_leaf, theirs_leaf in zip(*map(tf.nest.flatten, (ours, theirs)), strict=True):
            np.testing.assert_array_equal(ours_leaf, theirs_leaf)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_elements_of_any_dtype(dtype: str, first: bool) -> None:
    parts = (of_dtype(dtype), _X) if first else (_X, of_dtype(dtype))
    dataset = tf.data.Dataset.from_tensor_slices(parts).batch(3)
    made = mapped(dataset, second_rows)
    assert isinstance(made, DerivedDataset)
    same(made, dataset.map(second_rows))


@pytest.mark.parametrize(
    ("data", "function"),
    [
        pytest.param(_X, lambda x: x + 1, id="a tensor"),
        pytest.param((_X,), lambda x: (x + 1,), id="a tuple of one"),
        pytest.param({"b": _X, "a": _X[:, 0]}, lambda d: (d["a"], {"c": d["b"]}), id="a dict"),
        pytest.param(((_X, {"a": _X}), _X[:, 0]), lambda x, y: (y, (x[1]["a"], x[0])), id="nested"),
        pytest.param(Pair(_X, _X[:, 0]), lambda pair: Pair(pair.y, pair.x), id="a named tuple"),
    ],
)
def test_elements_of_any_structure(data: Any, function: Callable[..., Any]) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(2)
    made = mapped(dataset, function)
    assert isinstance(made, DerivedDataset)
    same(made, dataset.map(function))


def test_specs_may_have_names_and_the_same_ones() -> None:
    signature = (tf.TensorSpec([None, 3], tf.float32, "same"), tf.TensorSpec([None], name="same"))
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(_X, _X[:, 0])]), output_signature=signature
    )
    ours, theirs = mapped(dataset, second_rows), dataset.map(second_rows)
    assert ours.element_spec == theirs.element_spec
    (x, y), shape = next(elements(ours).values)
    assert (x.shape, y.shape, shape.numpy().tolist()) == ((1, 3), (1,), [_ROWS, 3])


def test_what_is_not_dense_is_mapped_by_tensorflow() -> None:
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
    dataset = tf.data.Dataset.from_tensor_slices(ragged).batch(2)
    made = mapped(dataset, lambda rows: rows + 1)
    assert not isinstance(made, DerivedDataset)
    assert [rows.to_list() for rows in made] == [[[1], [2, 3]], [[4, 5, 6]]]


def test_it_is_the_function_of_map_on_one_device() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((_X, _X)).batch(2).map(lambda x, y: (y, x))
    ours, theirs = mapped(dataset, second_rows), dataset.map(second_rows)
    assert names_of_maps(ours) == names_of_maps(theirs) == ["second_rows", "lambda"]
    (function,) = ours._functions()
    attributes = function.function.function_def.attr
    assert attributes["experimental_ints_on_device"].b  # else it is optimized at each opening


def test_what_a_function_captures() -> None:
    added = tf.random.stateless_uniform([100, 3], seed=(1, 2))
    dataset = tf.data.Dataset.from_tensor_slices(_X).batch(2)
    same(mapped(dataset, lambda x: x + added[:1]), dataset.map(lambda x: x + added[:1]))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_slices_of_a_source(dtype: str, replicas: int) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((of_dtype(dtype), _X)).batch(3)
    source = DatasetSource(dataset, world=SingleWorld(), sliced=True)
    source._replica, source._replicas = replicas - 1, replicas
    made = mapped(dataset, source._slice)
    same(made, dataset.map(source._slice))
    assert names_of_maps(made) == ["DatasetSource._slice"]


def test_options_and_errors_of_what_is_below_come_through() -> None:
    options = tf.data.Options()
    options.deterministic = False
    numbers = tf.data.Dataset.from_tensors([1.0, float("nan")])
    below = numbers.map(lambda x: tf.debugging.check_numerics(x, "of the user")).with_options(
        options
    )
    made = mapped(below, second_rows)
    assert made.options().deterministic is False
    with pytest.raises(tf.errors.InvalidArgumentError, match="of the user"):
        next(elements(made).values)


@pytest.mark.parametrize("to_ours", [True, False])
def test_states_are_those_of_map(to_ours: bool) -> None:
    """So that a checkpoint of a version that used `map` resumes inside its epoch."""

    def pair() -> list[tf.data.Dataset]:
        dataset = tf.data.Dataset.range(20).shuffle(20, seed=3).batch(2)
        return [
            each.prefetch(2) for each in (dataset.map(second_rows), mapped(dataset, second_rows))
        ]

    before, after = pair() if to_ours else pair()[::-1]
    first, second = elements(before), elements(after)
    for _ in range(4):
        next(first.values)
    state = state_of(first.resource)
    assert state is not None
    set_state(second.resource, state)
    left = [[np.asarray(leaf).tolist() for leaf in tf.nest.flatten(x)] for x in first.values]
    assert len(left) == 6
    assert left == [
        [np.asarray(leaf).tolist() for leaf in tf.nest.flatten(x)] for x in second.values
    ]
