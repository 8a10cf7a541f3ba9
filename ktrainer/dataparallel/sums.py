"""Sums of floats on a channel: the engine's fused buckets, each compared between ranks first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from mpi4py import MPI

from ktrainer.dataparallel.calls import Call, call_of, rows_spec, specs_of
from ktrainer.dataparallel.channel import Channel
from ktrainer.distributed.host_groups import HostGroups
from ktrainer.distributed.mpi_gradients import MpiGradients

_NO_WEIGHT = np.array(0.0)


class ChannelSums(MpiGradients):
    """`MpiGradients` whose host functions run as calls of a channel.

    Args:
        channel: its ranks; sums use a communicator of their own, under its lock.
    """

    def __init__(self, channel: Channel) -> None:
        self._opened = self  # also in the copies that `configured` makes
        super().__init__(channel.world)
        self._channel = channel
        self._operation = "allreduce"
        self._mean, self._settings = False, _settings("none", 25.0, False)

    def configured(
        self, operation: str, compression: str = "none", bucket_mb: float = 25.0, mean: bool = False
    ) -> ChannelSums:
        """The same communicator, with other settings.

        Args:
            operation: names the calls in messages.
            compression: as in `MpiGradients`.
            bucket_mb: largest bucket, in MiB.
            mean: weights are divided by the number of ranks that have not joined.
        """
        other = copy.copy(self)
        other._operation, other._mean = operation, mean
        other._settings = _settings(compression, bucket_mb, mean)
        other.set_wire(compression, bucket_mb)
        return other

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of sums: that of the ranks now, in functions compiled before too."""
        self.world.check_usable()
        return self._opened._comm

    @property
    def hosts(self) -> HostGroups | None:
        """Groups of the ranks now, by host."""
        self.world.check_usable()
        return self._opened._hosts

    @property
    def size(self) -> int:
        """The number of ranks now."""
        return self.world.size

    @size.setter
    def size(self, value: int) -> None:
        """It is that of the world."""

    def reduce_now(self, weight: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums over ranks of `weight * array`, as one bucket, of floats of one type."""
        specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
        return self._timed(self.bucket_call(specs))(weight, *arrays)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        run = super()._timed(call)
        slices = call == self.gather_slices

        def as_call(weight: np.ndarray, *arrays: np.ndarray) -> Any:
            specs = tuple(map(rows_spec, arrays)) if slices else specs_of(arrays)
            kind = "slices" if slices else "bucket"
            same = call_of(self._operation, kind, specs, self._settings)
            with self._channel.call(same) as present:
                # Divided here, as a compiled function may outlive a change of the ranks.
                return run(weight / len(present) if self._mean else weight, *arrays)

        return as_call

    def take_part(self, call: Call) -> None:
        """Do this rank's part of a sum of the other ranks, as one that has joined."""
        sums = self.configured(call.operation, **dict(call.detail))
        arrays = [np.zeros([max(n, 0) for n in spec.shape], spec.dtype) for spec in call.tensors]
        if call.kind == "slices":
            sums.gather_slices(_NO_WEIGHT, *arrays)
        else:
            specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
            sums.bucket_call(specs)(_NO_WEIGHT, *arrays)


def _settings(compression: str, bucket_mb: float, mean: bool) -> tuple[tuple[str, Any], ...]:
    """The arguments of `configured`, for comparison between ranks."""
    return ("compression", compression), ("bucket_mb", bucket_mb), ("mean", mean)
