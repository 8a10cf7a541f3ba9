"""Operations of a reduction, and what travels on the wire."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ktrainer.errors import ConfigError


class ReduceOp(Enum):
    """How the ranks' values become one: element by element, but for ADASUM.

    ADASUM adds gradients such that parallel ones are averaged and orthogonal ones summed; see
    `ktrainer.dataparallel.adasum`.
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


class Compression(Enum):
    """The type of floats on the wire; results have the type of the input.

    `fp16` and `bf16` send 16 bits of each float, and add them up in float32.
    """

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"


def checked_op(op: Any, average: bool | None = None) -> ReduceOp:
    """The operation that `op`, or Horovod's older argument `average`, asks for.

    Raises:
        ConfigError: `op` is no ReduceOp, or both are given.
    """
    if op is not None and average is not None:
        raise ConfigError(
            "`average` and `op` are two names of one thing; give `op` alone.", path="op", value=op
        )
    if op is None:
        return ReduceOp.SUM if average is False else ReduceOp.AVERAGE
    if not isinstance(op, ReduceOp):
        known = [f"ReduceOp.{each.name}" for each in ReduceOp]
        raise ConfigError(
            f"{op!r} is no operation of a reduction; use one of {', '.join(known)}.",
            path="op",
            value=op,
        )
    return op


def checked_compression(compression: Any) -> Compression:
    """`compression`, if it is one.

    Raises:
        ConfigError: it is not; a Compressor class of one's own is not supported.
    """
    if not isinstance(compression, Compression):
        raise ConfigError(
            f"{compression!r} is no compression; use Compression.none, Compression.fp16 or "
            "Compression.bf16. A Compressor class of your own cannot be used: cast the tensors "
            "before the call instead.",
            path="compression",
            value=compression,
        )
    return compression


def refuse_devices(device_dense: str, device_sparse: str) -> None:
    """Refuse the devices that older versions let a script choose for its all-reduces.

    Raises:
        ConfigError: one of them is given.
    """
    for name, device in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        if device:
            raise ConfigError(
                "the device of an all-reduce cannot be chosen: gradients are reduced in host "
                "memory. Leave this argument out.",
                path=name,
                value=device,
            )


def bucket_megabytes(bucket_cap_mb: float) -> float:
    """The size of a bucket of gradients in MiB, if it is a multiple of 128 bytes.

    Raises:
        ConfigError: it is not, or is not positive.
    """
    size = bucket_cap_mb * 2**20
    if size <= 0 or size % 128:
        raise ConfigError(
            f"a bucket of {bucket_cap_mb} MiB has {size:g} bytes, which must be a positive "
            "multiple of 128. Use whole MiB, such as the default of 25.",
            path="bucket_cap_mb",
            value=bucket_cap_mb,
        )
    return bucket_cap_mb
