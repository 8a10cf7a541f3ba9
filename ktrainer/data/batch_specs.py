"""Specs of batches: the shapes that a step is traced for."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ktrainer.data.local_batch import leaf_names
from ktrainer.errors import DataError


def spec_of(batch: Any) -> Any:
    """The spec of a concrete batch, its batch dimension None."""
    return tf.nest.map_structure(_leaf_spec, batch)


def _leaf_spec(leaf: Any) -> Any:

    if leaf is None:
        return None
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return any_rows(tf.type_spec_from_value(leaf))
    return tf.TensorSpec((None, *leaf.shape[1:]), tf.as_dtype(leaf.dtype))


def any_rows(spec: Any) -> Any:
    """The spec with its batch dimension unknown."""
    if isinstance(spec, tf.TensorSpec):
        if spec.shape.rank is None:
            return spec
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            [None, *spec.shape[1:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        shape = None if spec.shape.rank is None else [None, *spec.shape[1:]]
        return tf.SparseTensorSpec(shape, spec.dtype)
    return None


def fits(batch: Any, spec: Any) -> bool:
    """Return whether a batch's shapes are covered by `spec` (its structure and dtypes are)."""
    for leaf, wanted in zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True):
        if leaf is None or wanted is None:
            if leaf is not wanted:
                return False
            continue
        if isinstance(wanted, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            continue
        dims, known = tuple(leaf.shape), wanted.shape
        if known.rank is None:
            continue
        if len(dims) != known.rank or any(
            want is not None and want != have
            for want, have in zip(known.as_list()[1:], dims[1:], strict=True)
        ):
            return False
    return True


def widen(spec: Any, other: Any) -> Any:
    """The narrowest spec that covers two of the same structure.

    Raises:
        DataError: structure, dtype, kind or number of dimensions differ.
    """
    require_same_structure(spec, other)
    names = iter(leaf_names(spec))
    return tf.nest.map_structure(lambda a, b: _widen_leaf(next(names), a, b), spec, other)


def require_same_structure(one: Any, two: Any) -> None:
    """Raise a DataError unless two batches or specs have the same nesting and keys."""
    try:
        tf.nest.assert_same_structure(one, two)
    except (ValueError, TypeError) as error:
        raise DataError(
            "batches of one data source must all have the same structure, but one has "
            f"{', '.join(leaf_names(one))} and another {', '.join(leaf_names(two))}"
        ) from error


def _widen_leaf(name: str, one: Any, two: Any) -> Any:
    if one is None and two is None:
        return None
    same_kind = type(one) is type(two) and one.dtype == two.dtype
    if not same_kind or one.shape.rank != two.shape.rank:
        raise DataError(
            f"batches of one data source must agree in {name}, but one has {one} and another {two}"
        )
    if not isinstance(one, tf.TensorSpec) or one.shape.rank is None:
        return one
    dims = zip(one.shape.as_list(), two.shape.as_list(), strict=True)
    return tf.TensorSpec([a if a == b else None for a, b in dims], one.dtype)


def padding_row(spec: Any) -> Any:
    """One row of zeros (empty strings) that fits `spec`; unknown dimensions have length 1."""
    return tf.nest.map_structure(_zero_row, spec)


def _zero_row(spec: Any) -> Any:
    if spec is None:
        return None
    if spec.shape.rank is None:
        raise DataError(
            "this rank has no data at all, and the shapes of the others' are not known beforehand; "
            "give the pipeline static ranks (`tf.ensure_shape`)"
        )
    shape = [1, *(1 if dim is None else dim for dim in spec.shape[1:])]
    if isinstance(spec, tf.RaggedTensorSpec):
        row: Any = "" if spec.dtype == tf.string else 0
        for _ in range(spec.ragged_rank):
            row = [row]
        return tf.ragged.constant([row], spec.dtype, spec.ragged_rank)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(tf.zeros(shape, spec.dtype))
    return tf.zeros(shape, spec.dtype)
