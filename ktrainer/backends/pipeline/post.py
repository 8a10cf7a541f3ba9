"""Tensors from stage to stage: point to point over MPI, with deadlines.

Sends are started and not waited for; receives are posted before they are needed; so transfers
go on while stages compute. Shapes and types are agreed once for each shape of microbatch, and
bytes travel as they are, bfloat16 included.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.transfers import Transfer
from ktrainer.backends.pipeline.wire import HostWire, Parcel, Wire, make_wire
from ktrainer.world import World, chunks

_KINDS = {"activation": 0, "gradient": 1}
_PARTS = 64  # more tensors than this over one cut share a message tag in turn, in order
_AGREE = 0  # the tag of messages that are not arrays


@dataclass
class Waits:
    """Seconds spent waiting for other stages so far."""

    seconds: float = 0.0


class Post:
    """Sends and receives the tensors of a pipeline, in one process.

    Args:
        world: the processes of one replica, in the order of partitions.
        stages: how many stages there are; stage s is in process s modulo the size of `world`.
        waits: where the time spent waiting for other stages is added up.
        wire: the memory that tensors travel through; by default the GPU's where MPI can use it,
            else the host's.
        channels: ways for arrays that no schedule plans; see `start_send`.
    """

    def __init__(
        self,
        world: World,
        stages: int,
        waits: Waits | None = None,
        wire: Wire | None = None,
        channels: int = 0,
    ) -> None:
        self.world, self.stages, self.channels = world, stages, channels
        self.wire = wire or (make_wire() if world.size > 1 else HostWire())
        self._wait: Any = getattr(world, "wait", None)  # one process has no one to wait for
        self._comm: Any = getattr(world, "comm", None)
        self._waits = waits or Waits()
        self._sending: list[tuple[Any, Parcel, str]] = []
        self._coming: dict[Transfer, list[tuple[list[Any], Parcel]]] = {}
        self._here: dict[Transfer, list[Any]] = {}

    def send(self, transfer: Transfer, tensors: Sequence[Any]) -> None:
        """Start to send what a stage has made."""
        to = transfer.destination % self.world.size
        if to == self.world.rank:
            self._here[transfer] = list(tensors)
            return
        for part, tensor in enumerate(tensors):
            parcel = self.wire.pack(tensor)
            for piece in parcel.pieces:
                request = self._comm.Isend(piece, to, self._tag(transfer, part))
                self._sending.append((request, parcel, self._what(transfer, "to", to)))
        self._sending = [entry for entry in self._sending if not entry[0].Test()]

    def expect(self, transfer: Transfer, specs: Sequence[tf.TensorSpec]) -> None:
        """Post the receives of a transfer, so that it can arrive during computations."""
        source = transfer.source % self.world.size
        if source == self.world.rank or transfer in self._coming:
            return
        parts = []
        for part, spec in enumerate(specs):
            parcel = self.wire.make(spec)
            tag = self._tag(transfer, part)
            requests = [self._comm.Irecv(piece, source, tag) for piece in parcel.pieces]
            parts.append((requests, parcel))
        self._coming[transfer] = parts

    def receive(self, transfer: Transfer, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        """The tensors of a transfer, once they are here.

        Raises:
            DeadlineExceeded: they did not come; names the stage and the rank that owes them.
        """
        if transfer in self._here:
            return self._here.pop(transfer)
        self.expect(transfer, specs)
        start = time.perf_counter()
        source = transfer.source % self.world.size
        what = self._what(transfer, "from", source)
        parcels = []
        for requests, parcel in self._coming.pop(transfer):
            for request in requests:
                self._wait(request, what)
            parcels.append(parcel)
        self._waits.seconds += time.perf_counter() - start
        return [self.wire.unpack(parcel) for parcel in parcels]

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        start = time.perf_counter()
        for request, _, what in self._sending:
            self._wait(request, what)
        self._sending = []
        self._waits.seconds += time.perf_counter() - start

    def start_send(self, array: np.ndarray, partition: int, channel: int) -> list[Any]:
        """Start to send an array; returns what to `wait` for, with the array kept until then.

        Args:
            array: contiguous.
            partition: where it goes.
            channel: below `channels`; arrays arrive in order on each.
        """
        return [self._comm.Isend(piece, partition, 1 + channel) for piece in _pieces(array)]

    def start_receive(self, array: np.ndarray, partition: int, channel: int) -> list[Any]:
        """Start to receive an array of this size and type; returns what to `wait` for."""
        return [self._comm.Irecv(piece, partition, 1 + channel) for piece in _pieces(array)]

    def wait(self, requests: Sequence[Any], what: str) -> None:
        """Wait for what `start_send` or `start_receive` gave.

        Raises:
            DeadlineExceeded: naming `what`.
        """
        start = time.perf_counter()
        for request in requests:
            self._wait(request, what)
        self._waits.seconds += time.perf_counter() - start

    def who(self, partition: int) -> str:
        """A partition's process, for error messages."""
        return f"rank {self.world.ranks[partition]}"

    def tell(self, value: Any, partition: int, what: str) -> None:
        """Send a picklable object to another partition of this replica."""
        name = f"{what} to {self.who(partition)}"
        data = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        parts = [np.array([data.size], np.int64), *chunks.pieces(data)]
        for request in [self._comm.Isend(part, partition, _AGREE) for part in parts]:
            self._wait(request, name)

    def hear(self, partition: int, what: str) -> Any:
        """The object that another partition tells.

        Raises:
            DeadlineExceeded: it told nothing.
        """
        name = f"{what} from {self.who(partition)}"
        size = np.empty(1, np.int64)
        self._wait(self._comm.Irecv(size, partition, _AGREE), name)
        data = np.empty(int(size[0]), np.uint8)
        for request in [self._comm.Irecv(p, partition, _AGREE) for p in chunks.pieces(data)]:
            self._wait(request, name)
        return pickle.loads(data.data)

    def _tag(self, transfer: Transfer, part: int) -> int:
        place = transfer.microbatch * self.stages + transfer.destination
        number = (place * 2 + _KINDS[transfer.kind]) * _PARTS + part % _PARTS
        return 1 + self.channels + number

    def _what(self, transfer: Transfer, way: str, partition: int) -> str:
        return f"{transfer} {way} {self.who(partition)}"


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    return chunks.pieces(array.reshape(-1).view(np.uint8))
