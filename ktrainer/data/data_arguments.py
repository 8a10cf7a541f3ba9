"""The data arguments of `Model.fit`: kinds of data, targets, sample and class weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from ktrainer.data.dataset_shards import Files
from ktrainer.data.examples import is_random_access
from ktrainer.errors import DataError


def kind_of(data: Any) -> str:
    """`arrays`, `tf.data.Dataset`, `PyDataset`, `torch DataLoader`, `random access`, or
    `generator`."""
    if isinstance(data, (tf.data.Dataset, Files)):
        return "tf.data.Dataset"
    if isinstance(data, keras.utils.PyDataset):
        return "PyDataset"
    if is_torch_loader(data):
        return "torch DataLoader"
    if is_random_access(data):
        return "random access"
    if hasattr(data, "__next__") or callable(data):
        return "generator"
    arrays = isinstance(data, (tuple, list, dict)) or hasattr(data, "__array__")
    if arrays or not hasattr(data, "__iter__") or hasattr(data, "shape"):
        return "arrays"
    return "generator"


def is_torch_loader(data: Any) -> bool:
    """Return whether this is a `torch.utils.data.DataLoader`, told without importing torch."""
    return any(
        parent.__name__ == "DataLoader" and "torch.utils.data" in parent.__module__
        for parent in type(data).__mro__
    )


def from_torch(leaf: Any) -> Any:
    """A tensor of torch as a NumPy array; anything else as it is."""
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):
        return np.asarray(leaf.detach().cpu())
    return leaf


def copied(batch: Any) -> Any:
    """A user's batch in memory of its own: the code that made it may write the next one into the
    same arrays while this one waits for its step. Parts of files are read later, by slices."""

    def of_leaf(leaf: Any) -> Any:
        leaf = from_torch(leaf)
        if isinstance(leaf, tf.Variable):
            return tf.convert_to_tensor(leaf)
        if isinstance(leaf, np.memmap):
            return leaf
        copy = getattr(leaf, "copy", None)  # of NumPy, scipy, pandas
        return leaf if copy is None else copy()

    return tf.nest.map_structure(of_leaf, batch)


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
        f"{extra} was given beside data of the kind {kind}, which brings its own: let it yield "
        "(x, y) or (x, y, sample_weight), and leave the argument out"
    )


def split_validation(data: Any, fraction: float) -> tuple[Any, Any]:
    """Split arrays into all but their last rows, and these, as `Model.fit(validation_split=...)`.

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


def unpack_arrays(data: Any, class_weight: Mapping[int, float] | None = None) -> Any:
    """The structure that `Model.fit(x, y, sample_weight, class_weight=...)` trains on.

    Args:
        data: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`; each an array or a structure of
            arrays. A list is several inputs.
        class_weight: class -> weight; not together with sample weights or several targets.

    Returns:
        `x`, `(x, y)` or `(x, y, sample_weight)`, lists in it turned into tuples.
    """
    try:
        parts = data if isinstance(data, tuple) else (data,)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(parts)
    except ValueError as error:
        raise DataError(
            "arrays must be given as x, (x,), (x, y) or (x, y, sample_weight), got a sequence of "
            f"{len(data)}; give several inputs as a dict or a list"
        ) from error
    if weight is not None:
        if class_weight is not None:
            raise DataError("class_weight and sample weights exclude each other; give one of them")
        weight = _weights_for_targets(y, weight)
    if class_weight is not None and y is not None:
        weight = class_weights(y, class_weight)
    packed = keras.utils.pack_x_y_sample_weight(x, y, weight)
    return lists_to_tuples(packed)


def class_weights(y: Any, class_weight: Mapping[int, float]) -> np.ndarray:
    """The weight of each row's class, 1 for classes that are not named.

    Same numbers as Keras: one-hot targets by their largest entry, others rounded.

    Args:
        y: targets, `[rows]`, `[rows, 1]` or one-hot `[rows, classes]`.
        class_weight: class -> weight.
    """
    if tf.nest.is_nested(y):
        raise DataError("class_weight needs a model with a single output; use sample weights")
    classes = np.asarray(keras.ops.convert_to_numpy(y))
    if classes.ndim > 1:
        single = classes.shape[-1] == 1
        classes = np.squeeze(classes, -1) if single else np.argmax(classes, -1)
    classes = np.round(classes).astype(np.int32)
    if classes.ndim != 1:
        raise DataError("class_weight needs one class per row; use sample weights")
    known, where = np.unique(classes, return_inverse=True)
    weights = [class_weight.get(int(label), 1.0) for label in known]
    return np.asarray(weights, keras.config.floatx())[where]


def _weights_for_targets(y: Any, weight: Any) -> Any:
    """One array of sample weights for each of several targets, as Keras requires."""
    if not tf.nest.is_nested(y):
        return weight
    if tf.nest.is_nested(weight):
        try:
            tf.nest.assert_same_structure(lists_to_tuples(y), lists_to_tuples(weight))
        except (ValueError, TypeError) as error:
            raise DataError(
                "sample weights must be one array, or one per output in the structure of y"
            ) from error
        return weight
    shape = tuple(weight.shape)
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise DataError(
            f"a single array of sample weights for several outputs must have shape (rows,), not "
            f"{shape}; give one array per output instead"
        )
    return tf.nest.map_structure(lambda _: weight, y)


def lists_to_tuples(structure: Any) -> Any:
    """The same nesting with tuples for lists: to tf.data and tf.function a list is a tensor."""
    if isinstance(structure, (list, tuple)):
        return tuple(lists_to_tuples(part) for part in structure)
    if isinstance(structure, dict):
        return {key: lists_to_tuples(part) for key, part in structure.items()}
    return structure
