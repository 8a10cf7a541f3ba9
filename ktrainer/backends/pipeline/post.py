"""Tensors from stage to stage: point to point over MPI, through host memory, with deadlines.

Sends are started and not waited for; receives are posted before they are needed; so transfers
go on while stages compute. Shapes and types are agreed once for each shape of microbatch, and
bytes travel as they are, bfloat16 included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.transfers import Transfer
from ktrainer.world import World, chunks

_KINDS = {"activation": 0, "gradient": 1}
_PARTS = 64  # more tensors than this over one cut share a message tag in turn, in order
_AGREE = 0  # the tag of messages that are not tensors


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
    """

    def __init__(self, world: World, stages: int, waits: Waits | None = None) -> None:
        self.world, self.stages = world, stages
        self._wait: Any = getattr(world, "wait", None)  # one process has no one to wait for
        self._comm: Any = getattr(world, "comm", None)
        self._waits = waits or Waits()
        self._sending: list[tuple[Any, np.ndarray, str]] = []
        self._coming: dict[Transfer, list[tuple[list[Any], np.ndarray]]] = {}
        self._here: dict[Transfer, list[Any]] = {}

    def send(self, transfer: Transfer, tensors: Sequence[Any]) -> None:
        """Start to send what a stage has made."""
        to = transfer.destination % self.world.size
        if to == self.world.rank:
            self._here[transfer] = list(tensors)
            return
        for part, tensor in enumerate(tensors):
            array = np.ascontiguousarray(tensor.numpy())
            for piece in chunks.pieces(_bytes(array)):
                request = self._comm.Isend(piece, to, self._tag(transfer, part))
                self._sending.append((request, array, self._what(transfer, "to", to)))
        self._sending = [entry for entry in self._sending if not entry[0].Test()]

    def expect(self, transfer: Transfer, specs: Sequence[tf.TensorSpec]) -> None:
        """Post the receives of a transfer, so that it can arrive during computations."""
        source = transfer.source % self.world.size
        if source == self.world.rank or transfer in self._coming:
            return
        parts = []
        for part, spec in enumerate(specs):
            array = np.empty(tuple(spec.shape), spec.dtype.as_numpy_dtype)
            tag = self._tag(transfer, part)
            pieces = chunks.pieces(_bytes(array))
            parts.append(([self._comm.Irecv(piece, source, tag) for piece in pieces], array))
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
        arrays = []
        for requests, array in self._coming.pop(transfer):
            for request in requests:
                self._wait(request, what)
            arrays.append(array)
        self._waits.seconds += time.perf_counter() - start
        return [tf.convert_to_tensor(array) for array in arrays]

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        start = time.perf_counter()
        for request, _, what in self._sending:
            self._wait(request, what)
        self._sending = []
        self._waits.seconds += time.perf_counter() - start

    def tell(self, value: Any, partition: int, what: str) -> None:
        """Send a picklable object to another partition of this replica; less than 2 GiB."""
        self._wait(self._comm.isend(value, partition, _AGREE), f"{what} to {self._who(partition)}")

    def hear(self, partition: int, what: str) -> Any:
        """The object that another partition tells.

        Raises:
            DeadlineExceeded: it told nothing.
        """
        name = f"{what} from {self._who(partition)}"
        self._wait(_Probe(self._comm, partition), name)
        return self._comm.recv(None, partition, _AGREE)

    def _tag(self, transfer: Transfer, part: int) -> int:
        place = transfer.microbatch * self.stages + transfer.destination
        return 1 + (place * 2 + _KINDS[transfer.kind]) * _PARTS + part % _PARTS

    def _what(self, transfer: Transfer, way: str, partition: int) -> str:
        return f"{transfer} {way} {self._who(partition)}"

    def _who(self, partition: int) -> str:
        return f"rank {self.world.ranks[partition]}"


class _Probe:
    """A request that is done once a message is there."""

    def __init__(self, comm: Any, source: int) -> None:
        self._comm, self._source = comm, source

    def Test(self) -> bool:
        return bool(self._comm.Iprobe(self._source, _AGREE))


def _bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array as bytes: MPI need not know its type."""
    return array.reshape(-1).view(np.uint8)
