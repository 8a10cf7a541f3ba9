"""Transport of tensors between stages: point to point over MPI, with deadlines.

Sends are not waited for and receives are posted before they are needed, so transfers overlap with
computation. Shapes and types are exchanged once for each shape of microbatch; tensors are sent as
bytes, bfloat16 included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.message_buffers import (
    HostBuffers,
    Message,
    MessageBuffers,
    make_buffers,
)
from ktrainer.backends.pipeline.schedules.transfers import Transfer
from ktrainer.distributed import World, mpi_chunks
from ktrainer.distributed.mpi_progress import has_completed
from ktrainer.state.trace_spans import MESSAGES, add_span, is_tracing

_KINDS = {"activation": 0, "gradient": 1}
_PARTS = 64  # more tensors than this over one cut reuse message tags, in order
_OBJECT = 0  # the tag of pickled objects

_Started = tuple[Any, Any, str]  # a request, the owner of its memory, and what it is


@dataclass
class WaitTime:
    """Seconds spent waiting for other stages."""

    seconds: float = 0.0


class Transport:
    """Sends and receives the tensors of a pipeline, in one process.

    Args:
        world: the processes of one replica, in the order of partitions.
        stages: how many stages there are; stage s is in process s modulo the size of `world`.
        waits: accumulates the time spent waiting for other stages.
        buffers: how tensors become messages; by default device buffers where MPI can use them.
        channels: of arrays that are not part of a schedule; see `start_send`.
    """

    def __init__(
        self,
        world: World,
        stages: int,
        waits: WaitTime | None = None,
        buffers: MessageBuffers | None = None,
        channels: int = 0,
    ) -> None:
        self.world, self.stages, self.channels = world, stages, channels
        self.buffers = buffers or (make_buffers() if world.size > 1 else HostBuffers())
        self._wait: Any = getattr(world, "wait", None)  # None for one process
        self._waits = waits or WaitTime()
        self._sending: list[_Started] = []
        self._waiting: Sequence[_Started] = ()
        world.keep_if_interrupted(self)
        self._incoming: dict[Transfer, list[tuple[list[Any], Message]]] = {}
        self._local: dict[Transfer, list[Any]] = {}

    @property
    def _comm(self) -> Any:
        return cast(Any, self.world).comm

    def send(self, transfer: Transfer, tensors: Sequence[Any]) -> None:
        """Start to send the tensors of a transfer."""
        to = transfer.destination % self.world.size
        if to == self.world.rank:
            self._local[transfer] = list(tensors)
            return
        for part, tensor in enumerate(tensors):
            message = self.buffers.pack(tensor)
            for piece in message.pieces:
                request = self._comm.Isend(piece, to, self._tag(transfer, part))
                self._sending.append((request, message, self._what(transfer, "to", to)))
        self._sending = [entry for entry in self._sending if not has_completed(entry[0])]

    def post_receive(self, transfer: Transfer, specs: Sequence[tf.TensorSpec]) -> None:
        """Post the receives of a transfer, so that it arrives during computation."""
        source = transfer.source % self.world.size
        if source == self.world.rank or transfer in self._incoming:
            return
        parts = []
        for part, spec in enumerate(specs):
            message = self.buffers.allocate(spec)
            tag = self._tag(transfer, part)
            requests = [self._comm.Irecv(piece, source, tag) for piece in message.pieces]
            parts.append((requests, message))
        self._incoming[transfer] = parts

    def receive(self, transfer: Transfer, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """Wait for the tensors of a transfer.

        Raises:
            DeadlineExceeded: they did not arrive; names the stage and the rank that sends them.
        """
        if transfer in self._local:
            return self._local.pop(transfer)
        self.post_receive(transfer, specs)
        parts = self._incoming.pop(transfer)
        source = transfer.source % self.world.size
        what = self._what(transfer, "from", source)
        self._wait_for([(each, message, what) for requests, message in parts for each in requests])
        return [self.buffers.unpack(message) for _, message in parts]

    def finish(self) -> None:
        """Wait until all sends are complete."""
        self._wait_for(self._sending)
        self._sending = []

    def start_send(self, array: np.ndarray, partition: int, channel: int) -> list[Any]:
        """Start to send an array; return the requests to `wait` for, the array kept until then.

        Args:
            array: contiguous.
            partition: the destination.
            channel: below `channels`; arrays arrive in order on each.
        """
        return [self._comm.Isend(piece, partition, 1 + channel) for piece in _pieces(array)]

    def send_shaped(self, array: np.ndarray, partition: int, channel: int, what: str) -> None:
        """Start to send an array for `receive_shaped`, which does not know its shape.

        Args:
            what: names it, should a deadline pass.
        """
        name = f"{what} to {self.rank_name(partition)}"
        # Not ascontiguousarray, which gives a scalar a dimension.
        contiguous = np.asarray(array, order="C")
        shape = np.array([contiguous.ndim, *contiguous.shape], np.int64)
        for each in (shape, contiguous):
            requests = self.start_send(each, partition, channel)
            self._sending += [(request, each, name) for request in requests]

    def receive_shaped(
        self, ndim: int, dtype: Any, partition: int, channel: int, what: str
    ) -> np.ndarray:
        """Wait for what another partition sends by `send_shaped`.

        Raises:
            DeadlineExceeded: naming `what` and its rank.
        """
        name = f"{what} from {self.rank_name(partition)}"
        shape = np.empty(1 + ndim, np.int64)
        self.wait(self.start_receive(shape, partition, channel), name)
        array = np.empty(shape[1:], dtype)
        self.wait(self.start_receive(array, partition, channel), name)
        return array

    def start_receive(self, array: np.ndarray, partition: int, channel: int) -> list[Any]:
        """Start to receive into `array`; return the requests to `wait` for."""
        return [self._comm.Irecv(piece, partition, 1 + channel) for piece in _pieces(array)]

    def wait(self, requests: Sequence[Any], what: str) -> None:
        """Wait for requests of `start_send` or `start_receive`.

        Raises:
            DeadlineExceeded: naming `what`.
        """
        self._wait_for([(request, None, what) for request in requests])

    def _wait_for(self, started: Sequence[_Started]) -> None:
        start = time.perf_counter()
        self._waiting = started
        for request, _, what in started:
            self._wait(request, what)
        self._waiting = ()
        end = time.perf_counter()
        self._waits.seconds += end - start
        if started and is_tracing():
            add_span(MESSAGES, f"wait for {started[0][2]}", start, end)

    def rank_name(self, partition: int) -> str:
        """Name of a partition's process, for error messages."""
        return f"rank {self.world.ranks[partition]}"

    def send_object(self, value: Any, partition: int, what: str) -> None:
        """Send a picklable object to another partition of this replica."""
        name = f"{what} to {self.rank_name(partition)}"
        parts = mpi_chunks.parts_of_object(value)
        self.wait([self._comm.Isend(part, partition, _OBJECT) for part in parts], name)

    def receive_object(self, partition: int, what: str) -> Any:
        """Receive an object that another partition sends.

        Raises:
            DeadlineExceeded: it sent nothing.
        """
        name = f"{what} from {self.rank_name(partition)}"

        def receive(parts: list[np.ndarray]) -> None:
            self.wait([self._comm.Irecv(part, partition, _OBJECT) for part in parts], name)

        return mpi_chunks.receive_object(receive)

    def _tag(self, transfer: Transfer, part: int) -> int:
        place = transfer.microbatch * self.stages + transfer.destination
        number = (place * 2 + _KINDS[transfer.kind]) * _PARTS + part % _PARTS
        return 1 + self.channels + number

    def _what(self, transfer: Transfer, way: str, partition: int) -> str:
        return f"{transfer} {way} {self.rank_name(partition)}"


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    return mpi_chunks.pieces(array.reshape(-1).view(np.uint8))
