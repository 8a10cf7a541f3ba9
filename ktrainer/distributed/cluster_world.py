"""The world of processes that connect by address, without MPI: TF_CONFIG, or Slurm.

Rank 0 listens on its own address until all have connected, then leaves the address to TensorFlow
and keeps the connections. Every operation is one exchange through it: all send, it combines, all
receive the result. That is quick enough for host data: a few numbers each step.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

from ktrainer.config.cluster_environment import ClusterSpec
from ktrainer.distributed.stack_dump import Process, enable_stack_dumps, stack_dumps
from ktrainer.distributed.world import ReduceOp, World, for_reduction
from ktrainer.errors import DeadlineExceeded, KtrainerError, PeerLost, WorldError

KEY = "KTRAINER_CLUSTER_KEY"
_POLL_SECONDS = 0.2  # seconds
_HELLO_SECONDS = 1.0  # for each part of the handshake
_MARGIN_SECONDS = 2.0  # for rank 0 to name the missing ranks

Combine = Callable[[list[Any]], Any]


class ClusterWorld(World):
    """The workers of a cluster, the chief first.

    Messages are pickled, so both sides first prove that they know a key: the variable
    `KTRAINER_CLUSTER_KEY`, or else a digest of the cluster's addresses, which keeps out other
    processes unless they have seen TF_CONFIG.

    Args:
        cluster: all processes, and which one this is.
        start_timeout: seconds to wait for the others to connect.

    Raises:
        DeadlineExceeded: some did not connect in time; they are named.
    """

    name = "cluster"

    def __init__(self, cluster: ClusterSpec, start_timeout: float) -> None:
        self.cluster = cluster
        addresses = cluster.workers
        self.rank, self.size = cluster.number, len(addresses)
        hosts = [address.rpartition(":")[0] for address in addresses]
        same = [i for i, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Process] = {}
        connect = self._accept_all if self.is_root else self._join
        connect(_key(cluster), start_timeout)
        self._processes |= enumerate(self.allgather(enable_stack_dumps(), "process of each rank"))

    def barrier(self, what: str = "barrier") -> None:
        self._exchange(None, lambda values: None, what)

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        mine = value if self.rank == root else None
        return self._exchange(mine, lambda values: values[root], what)

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        values: list[Any] = self._exchange(value, lambda values: values, what)
        return values

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array, result_of = for_reduction(value, op)
        reduced = self._exchange(array, lambda values: _reduced(values, op), what)
        return result_of(np.asarray(reduced, array.dtype))

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _accept_all(self, key: bytes, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with listen_at(self.cluster.workers[0]) as listener:
            listener.settimeout(_POLL_SECONDS)
            while missing := [r for r in range(1, self.size) if r not in self._connections]:
                with suppress(TimeoutError):
                    self._accept(listener.accept()[0], key)
                if time.monotonic() > deadline:
                    self.close()
                    raise self._absent(missing, seconds)

    def _accept(self, accepted: socket.socket, key: bytes) -> None:
        accepted.settimeout(None)
        connection = Connection(accepted.detach())
        _limit(connection, _HELLO_SECONDS)
        with suppress(Exception):  # another program, or a rank that has ended
            rank = int.from_bytes(connection.recv_bytes(8), "big")
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            if 0 < rank < self.size and rank not in self._connections:
                self._connections[rank] = connection
                return
        connection.close()

    def _join(self, key: bytes, seconds: float) -> None:
        address = host_and_port(self.cluster.workers[0])
        deadline = time.monotonic() + seconds
        while not self._connections:
            try:
                raw = socket.create_connection(address, timeout=1.0)
            except OSError:
                if time.monotonic() > deadline:
                    raise self._absent([0], seconds) from None
                time.sleep(_POLL_SECONDS)
                continue
            raw.settimeout(None)
            connection = Connection(raw.detach())
            _limit(connection, max(deadline - time.monotonic(), _POLL_SECONDS))
            try:
                connection.send_bytes(self.rank.to_bytes(8, "big"))
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
            except BlockingIOError:  # something listens there, but does not answer
                connection.close()
                if time.monotonic() > deadline:
                    raise self._absent([0], seconds) from None
                continue
            except Exception as error:
                connection.close()
                raise WorldError(
                    f"rank {self.rank} is not known to rank 0 at {self.cluster.workers[0]}: give "
                    f"all processes the same addresses in TF_CONFIG and the same {KEY} ({error})"
                ) from error
            self._connections[0] = connection

    def _absent(self, ranks: list[int], seconds: float) -> DeadlineExceeded:
        return absent_error(self.rank, self._named(ranks), seconds)

    def _named(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {r} ({self.cluster.workers[r]})" for r in ranks)

    def _exchange(self, value: Any, combine: Combine, what: str) -> Any:
        """`combine` of all ranks' values, in the order of ranks, on every rank."""
        if self.size == 1:
            return combine([value])
        self.check_usable()
        try:
            with self.waiting():
                lead = self.is_root
                return self._lead(value, combine, what) if lead else self._follow(value, what)
        except PeerLost:
            raise  # as any later one will
        except BaseException as error:  # the others may be in this operation, or in the next
            self.record_interruption(error)
            raise

    def _lead(self, value: Any, combine: Combine, what: str) -> Any:
        try:
            values, deadline = {0: value}, time.monotonic() + self.deadline
            for rank, connection in self._connections.items():
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    silent = [r for r, c in self._connections.items() if r >= rank and not c.poll()]
                    raise self._late(what, silent)
                their, values[rank] = self._receive(rank, what)
                if their != what:
                    raise WorldError(
                        f"rank 0 is in {what!r} at step {self.step}, but rank {rank} in {their!r}: "
                        "they have taken different paths"
                    )
            result = combine([values[rank] for rank in range(self.size)])
        except KtrainerError as error:
            self._send_all(error)
            raise
        self._send_all(result)
        return result

    def _send_all(self, result: Any) -> None:
        for rank, connection in self._connections.items():
            try:
                _limit(connection, self.deadline)
                connection.send(result)
            except BlockingIOError:
                if not isinstance(result, KtrainerError):
                    raise self._late("send a result", [rank]) from None
            except OSError as error:
                if not isinstance(result, KtrainerError):
                    raise self._lost(rank, "send a result") from error

    def _follow(self, value: Any, what: str) -> Any:
        try:
            _limit(self._connections[0], self.deadline)
            self._connections[0].send((what, value))
        except BlockingIOError:
            raise self._late(what, [0]) from None
        except OSError as error:
            raise self._lost(0, what) from error
        if not self._connections[0].poll(self.deadline + _MARGIN_SECONDS):
            raise self._late(what, [0])
        result = self._receive(0, what)
        if isinstance(result, KtrainerError):
            raise result
        return result

    def _receive(self, rank: int, what: str) -> Any:
        try:
            _limit(self._connections[rank], self.deadline)
            return self._connections[rank].recv()
        except BlockingIOError:  # it stopped in the middle of a message
            raise self._late(what, [rank]) from None
        except (EOFError, OSError) as error:
            raise self._lost(rank, what) from error

    def _late(self, what: str, ranks: list[int]) -> DeadlineExceeded:
        others = f"No answer from {self._named(ranks)}: stopped, failed, or busy."
        if stacks := stack_dumps(self._processes, ranks):
            others = f"{others}\n{stacks}"
        return DeadlineExceeded(self.rank, self.step, what, self.deadline, others)

    def _lost(self, rank: int, what: str) -> PeerLost:
        address = self.cluster.workers[rank]
        return PeerLost(
            f"rank {self.rank} lost rank {rank} ({address}) at step {self.step} in {what!r}: its "
            "connection has ended"
        )


def _reduced(arrays: list[np.ndarray], op: ReduceOp) -> np.ndarray:
    if op == "min":
        return np.minimum.reduce(arrays)
    if op == "max":
        return np.maximum.reduce(arrays)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total / len(arrays) if op == "average" else total


def absent_error(rank: int, them: str, seconds: float) -> DeadlineExceeded:
    """The error for processes that did not connect in time; `them` names them."""
    return DeadlineExceeded(
        rank,
        0,
        "start of the cluster",
        seconds,
        f"Not there: {them}. Start them with the same script and their own TF_CONFIG, or raise "
        "backend.start_timeout.",
    )


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of an address `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen_at(address: str) -> socket.socket:
    """A listening socket at this process's own address.

    Raises:
        WorldError: the port is taken, or the address is not of this host.
    """
    try:
        return socket.create_server(host_and_port(address))
    except OSError as error:
        raise WorldError(
            f"cannot listen at {address}, which is this process's address: {error.strerror}. "
            "Choose a free port in TF_CONFIG, or under Slurm with KTRAINER_PORT."
        ) from error


def _limit(connection: Connection, seconds: float) -> None:
    """Make sends and receives raise BlockingIOError when nothing moves for so long."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _key(cluster: ClusterSpec) -> bytes:
    given = os.environ.get(KEY)
    return given.encode() if given else hashlib.sha256(str(cluster.workers).encode()).digest()
