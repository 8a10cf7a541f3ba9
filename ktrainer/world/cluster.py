"""The world of processes that know one another by address, without MPI: TF_CONFIG, or Slurm.

Rank 0 listens on its own address until all have come, then leaves the address to TensorFlow and
keeps the connections. Every operation is one exchange through it: all send, it combines, all get
the result. That is quick enough for what goes out of band: a few numbers each step.
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

from ktrainer.config.cluster import Cluster
from ktrainer.errors import DeadlineExceeded, KtrainerError, PeerLost, WorldError
from ktrainer.world.base import ReduceOp, World, for_reduction
from ktrainer.world.stacks import Process, answering, where_they_are

KEY = "KTRAINER_CLUSTER_KEY"
_POLL = 0.2  # seconds
_HELLO_SECONDS = 1.0  # for each part of a greeting
_MARGIN = 2.0  # seconds that rank 0 has to say who is missing

Combine = Callable[[list[Any]], Any]


class ClusterWorld(World):
    """The workers of a cluster, the chief first.

    What they send is pickled, so they prove to one another that they know a key before: the
    variable `KTRAINER_CLUSTER_KEY`, or else a digest of the cluster's addresses, which keeps out
    strangers, but nobody who has seen TF_CONFIG.

    Args:
        cluster: all processes, and which one this is.
        start_timeout: seconds to wait for the others.

    Raises:
        DeadlineExceeded: some were not there in time; they are named.
    """

    name = "cluster"

    def __init__(self, cluster: Cluster, start_timeout: float) -> None:
        self.cluster = cluster
        addresses = cluster.workers
        self.rank, self.size = cluster.number, len(addresses)
        hosts = [address.rpartition(":")[0] for address in addresses]
        same = [i for i, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)
        self._peers: dict[int, Connection] = {}
        self._processes: dict[int, Process] = {}
        meet = self._receive_all if self.is_root else self._join
        meet(_key(cluster), start_timeout)
        self._processes |= enumerate(self.allgather(answering(), "who is where"))

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
        array, dtype = for_reduction(value, op)
        reduced = self._exchange(array, lambda values: _reduced(values, op), what)
        return np.asarray(reduced).reshape(np.shape(value)).astype(dtype)

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()
        self._peers = {}

    def _receive_all(self, key: bytes, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with listen_at(self.cluster.workers[0]) as listener:
            listener.settimeout(_POLL)
            while missing := [r for r in range(1, self.size) if r not in self._peers]:
                with suppress(TimeoutError):
                    self._welcome(listener.accept()[0], key)
                if time.monotonic() > deadline:
                    self.close()
                    raise self._not_there(missing, seconds)

    def _welcome(self, accepted: socket.socket, key: bytes) -> None:
        accepted.settimeout(None)
        connection = Connection(accepted.detach())
        _limit(connection, _HELLO_SECONDS)
        with suppress(Exception):  # a stranger, or a peer that has gone again
            rank = int.from_bytes(connection.recv_bytes(8), "big")
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            if 0 < rank < self.size and rank not in self._peers:
                self._peers[rank] = connection
                return
        connection.close()

    def _join(self, key: bytes, seconds: float) -> None:
        address = host_and_port(self.cluster.workers[0])
        deadline = time.monotonic() + seconds
        while not self._peers:
            try:
                raw = socket.create_connection(address, timeout=1.0)
            except OSError:
                if time.monotonic() > deadline:
                    raise self._not_there([0], seconds) from None
                time.sleep(_POLL)
                continue
            raw.settimeout(None)
            connection = Connection(raw.detach())
            _limit(connection, max(deadline - time.monotonic(), _POLL))
            try:
                connection.send_bytes(self.rank.to_bytes(8, "big"))
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
            except BlockingIOError:  # somebody is there, who says nothing
                connection.close()
                if time.monotonic() > deadline:
                    raise self._not_there([0], seconds) from None
                continue
            except Exception as error:
                connection.close()
                raise WorldError(
                    f"rank {self.rank} is not known to rank 0 at {self.cluster.workers[0]}: give "
                    f"all processes the same addresses in TF_CONFIG and the same {KEY} ({error})"
                ) from error
            self._peers[0] = connection

    def _not_there(self, ranks: list[int], seconds: float) -> DeadlineExceeded:
        them = ", ".join(f"rank {r} ({self.cluster.workers[r]})" for r in ranks)
        return not_there(self.rank, them, seconds)

    def _exchange(self, value: Any, combine: Combine, what: str) -> Any:
        """`combine` of all ranks' values, in the order of ranks, on every rank."""
        if self.size == 1:
            return combine([value])
        return self._lead(value, combine, what) if self.is_root else self._follow(value, what)

    def _lead(self, value: Any, combine: Combine, what: str) -> Any:
        try:
            values, deadline = {0: value}, time.monotonic() + self.deadline
            for rank in self._peers:
                if not self._peers[rank].poll(max(0.0, deadline - time.monotonic())):
                    silent = [r for r, peer in self._peers.items() if r >= rank and not peer.poll()]
                    raise self._late(what, silent)
                their, values[rank] = self._receive(rank, what)
                if their != what:
                    raise WorldError(
                        f"rank 0 is in {what!r} at step {self.step}, but rank {rank} in {their!r}: "
                        "they have taken different paths"
                    )
            result = combine([values[rank] for rank in range(self.size)])
        except KtrainerError as error:
            self._tell(error)
            raise
        self._tell(result)
        return result

    def _tell(self, result: Any) -> None:
        for rank, peer in self._peers.items():
            try:
                _limit(peer, self.deadline)
                peer.send(result)
            except BlockingIOError:
                if not isinstance(result, KtrainerError):
                    raise self._late("send a result", [rank]) from None
            except OSError as error:
                if not isinstance(result, KtrainerError):
                    raise self._lost(rank, "send a result") from error

    def _follow(self, value: Any, what: str) -> Any:
        try:
            _limit(self._peers[0], self.deadline)
            self._peers[0].send((what, value))
        except BlockingIOError:
            raise self._late(what, [0]) from None
        except OSError as error:
            raise self._lost(0, what) from error
        if not self._peers[0].poll(self.deadline + _MARGIN):
            raise self._late(what, [0])
        result = self._receive(0, what)
        if isinstance(result, KtrainerError):
            raise result
        return result

    def _receive(self, rank: int, what: str) -> Any:
        try:
            _limit(self._peers[rank], self.deadline)
            return self._peers[rank].recv()
        except BlockingIOError:  # it has stopped in the middle of a message
            raise self._late(what, [rank]) from None
        except (EOFError, OSError) as error:
            raise self._lost(rank, what) from error

    def _late(self, what: str, ranks: list[int]) -> DeadlineExceeded:
        them = ", ".join(f"rank {r} ({self.cluster.workers[r]})" for r in ranks)
        others = f"No answer from {them}: stopped, died, or busy."
        if stacks := where_they_are(self._processes, ranks):
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


def not_there(rank: int, them: str, seconds: float) -> DeadlineExceeded:
    """The error of a cluster that `them` have not come to in time."""
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
        WorldError: somebody else has the port, or the address is not of this host.
    """
    try:
        return socket.create_server(host_and_port(address))
    except OSError as error:
        raise WorldError(
            f"cannot listen at {address}, which is this process's address: {error.strerror}. "
            "Choose a free port in TF_CONFIG, or under Slurm with KTRAINER_PORT."
        ) from error


def _limit(connection: Connection, seconds: float) -> None:
    """Let a send or receive end with BlockingIOError when nothing moves for so long."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _key(cluster: Cluster) -> bytes:
    given = os.environ.get(KEY)
    return given.encode() if given else hashlib.sha256(str(cluster.workers).encode()).digest()
