"""Kinds of data, and what `Model.fit` takes beside each of them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from ktrainer.errors import DataError


def kind_of(data: Any) -> str:
    """`arrays`, `tf.data.Dataset`, `PyDataset`, `torch DataLoader`, or `generator`."""
    if isinstance(data, tf.data.Dataset):
        return "tf.data.Dataset"
    if isinstance(data, keras.utils.PyDataset):
        return "PyDataset"
    if is_torch_loader(data):
        return "torch DataLoader"
    if hasattr(data, "__next__") or callable(data):
        return "generator"
    arrays = isinstance(data, (tuple, list, dict)) or hasattr(data, "__array__")
    if arrays or not hasattr(data, "__iter__") or hasattr(data, "shape"):
        return "arrays"
    return "generator"


def is_torch_loader(data: Any) -> bool:
    """Whether this is a `torch.utils.data.DataLoader`, told without importing torch."""
    return any(
        parent.__name__ == "DataLoader" and "torch.utils.data" in parent.__module__
        for parent in type(data).__mro__
    )


def require_no_targets(x: Any, y: Any, sample_weight: Any) -> None:
    """Refuse `y` or sample weights beside data that brings its own.

    Raises:
        DataError: as said.
    """
    kind = kind_of(x)
    if kind == "arrays":
        return
    extra = "y" if y is not None else "sample_weight"
    raise DataError(
        f"{extra} was given beside a {kind}, whose batches bring their own: let it yield "
        "(x, y) or (x, y, sample_weight), and leave the argument out"
    )


def split_validation(data: Any, fraction: float) -> tuple[Any, Any]:
    """Arrays without their last rows, and these, as `Model.fit(validation_split=...)` has them.

    Raises:
        DataError: the data is not arrays, or one of the two parts would have no rows.
    """
    if not (isinstance(fraction, (int, float)) and 0 < fraction < 1):
        raise DataError(f"validation_split must be between 0 and 1, not {fraction!r}")
    if (kind := kind_of(data)) != "arrays":
        raise DataError(
            f"validation_split needs arrays, but the data is a {kind}: give validation_data"
        )
    parts = data if isinstance(data, tuple) else (data,)
    try:
        first, last = array_slicing.train_validation_split(parts, validation_split=fraction)
    except ValueError as error:
        raise DataError(f"validation_split={fraction:g}: {error}") from None
    return first, last
