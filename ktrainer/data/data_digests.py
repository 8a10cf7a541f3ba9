"""Short digests of data, to detect ranks that hold different rows at a bounded cost."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.data.local_batch import leaf_names

_SAMPLE_BYTES = 1 << 22
_SAMPLE_ROWS = 4096
_SAMPLE_ELEMENTS = 1024
_BUCKETS = 1 << 62


def array_digest(leaf: Any) -> str:
    """Dtype, shape, and a hash of at most 4096 rows (4 MiB) spread evenly over `leaf`.

    Arrays in different orders, or of different data, have different digests; arrays that differ
    only in rows between the sampled ones do not.
    """
    if leaf is None:
        return "none"
    if not isinstance(leaf, np.ndarray):
        return f"{type(leaf).__name__} {int(tensor_digest(leaf)):x}"
    rows = max(1, leaf.shape[0])
    count = min(rows, _SAMPLE_ROWS, max(1, _SAMPLE_BYTES * rows // max(1, leaf.nbytes)))
    sample = leaf[np.linspace(0, leaf.shape[0] - 1, count).astype(np.int64)] if leaf.size else leaf
    return f"{leaf.dtype}{list(leaf.shape)} {_blake(sample, 8).hex()}"


def batch_digest(leaf: Any) -> int:
    """A non-negative int64 hash of a leaf of a batch: its shape and fewer than 2048 elements."""
    if leaf is None:
        return 0
    if not isinstance(leaf, np.ndarray):
        return int(tensor_digest(leaf))
    flat = leaf.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLE_ELEMENTS)]
    return int.from_bytes(_blake(sample, 7, repr(leaf.shape).encode()), "little")


def batch_facts(batch: Any) -> dict[str, str]:
    """A digest of each leaf of a batch, named as in `Feed.fingerprint`."""
    leaves = zip(leaf_names(batch), tf.nest.flatten(batch), strict=True)
    return {f"first batch/{name}": f"{batch_digest(leaf):016x}" for name, leaf in leaves}


def tensor_digest(value: Any) -> tf.Tensor:
    """Like `batch_digest`, of TensorFlow ops, to run inside a tf.data pipeline.

    Takes dense, sparse or ragged tensors of any dtype, or None; gives an int64 scalar.
    """
    if value is None:
        return tf.constant(0, tf.int64)
    texts = []
    for part in tf.nest.flatten(value, expand_composites=True):
        flat = tf.reshape(part, [-1])
        stride = tf.maximum(1, tf.size(flat) // _SAMPLE_ELEMENTS)
        texts.append(tf.io.serialize_tensor(flat[::stride]))
        texts.append(tf.io.serialize_tensor(tf.shape(part)))
    return tf.strings.to_hash_bucket_fast(tf.strings.join(texts), _BUCKETS)


def _blake(sample: np.ndarray, size: int, extra: bytes = b"") -> bytes:
    data = np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(data.data, digest_size=size)
    digest.update(extra)
    return digest.digest()
