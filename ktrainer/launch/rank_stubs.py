"""The other ends of stubs: programs that mpirun starts in place of ranks; see `rank_stub`."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktrainer.launch import rank_process, rank_stub

PYTHON = ("python", "-m")  # comes before the module in a rank's command
_BACKLOG = 1024
_REQUEST_SECONDS = 5.0


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `command` of mpirun, split into its own words and the command of a rank."""
    at = command.index(rank_process.__name__) - len(PYTHON)
    return list(command[:at]), list(command[at:])


def stub_command(path: Path) -> list[str]:
    """The command of a stub that connects to the socket `path`."""
    return [sys.executable, "-I", "-S", rank_stub.__file__, str(path)]


def listen(path: Path) -> socket.socket:
    """A socket at `path`, for stubs to connect to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def accept(listener: socket.socket) -> tuple[socket.socket, list[int], Any] | None:
    """A stub's connection, files and request, which is its environment, working folder, umask and
    command; None if it ended before it sent them."""
    peer, _ = listener.accept()
    peer.settimeout(_REQUEST_SECONDS)
    try:
        files, request = _receive_request(peer)
    except (OSError, ValueError):
        peer.close()
        return None
    peer.settimeout(None)
    return peer, files, request


def _receive_request(peer: socket.socket) -> tuple[list[int], Any]:
    head, files, _, _ = socket.recv_fds(peer, rank_stub.LENGTH.size, rank_stub.FILES)
    try:
        if len(head) < rank_stub.LENGTH.size or len(files) < rank_stub.FILES:
            raise ValueError("not a request of a stub")
        left, data = rank_stub.LENGTH.unpack(head)[0], b""
        while len(data) < left:
            more = peer.recv(left - len(data))
            if not more:
                raise ConnectionError("the stub was ended")
            data += more
        return files, json.loads(data)
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        raise


class RemoteStubs:
    """The stubs of ranks on other hosts: a stub ends as its rank does, and the rank with its stub.

    Args:
        folder: for the socket.
        start: starts a rank: its number, and the environment that MPI has made for it.
        kill: kills a rank whose stub mpirun has ended.
    """

    def __init__(
        self,
        folder: Path,
        start: Callable[[int, Mapping[str, str]], None],
        kill: Callable[[int], None],
    ) -> None:
        self._path, self._start, self._kill = folder / "stubs", start, kill
        self._listener = listen(self._path)
        self._awake, self._wake = socket.socketpair()
        self._peers: dict[int, socket.socket] = {}  # by rank
        self._ended: deque[int] = deque()  # other threads add to it
        self._thread = threading.Thread(target=self._serve, name="stubs of ranks", daemon=True)
        self._thread.start()

    @property
    def command(self) -> list[str]:
        """The command of a stub."""
        return stub_command(self._path)

    def end_as(self, rank: int, status: int) -> None:
        """End a rank's stub with a status of waitpid(2), as the rank has."""
        self._ended.append(rank)
        if (peer := self._peers.get(rank)) is not None:
            with contextlib.suppress(OSError):
                peer.sendall(rank_stub.LENGTH.pack(status))

    def take_ended(self) -> list[int]:
        """The ranks that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def lose(self, ranks: Iterable[int]) -> None:
        """End the stubs of lost ranks as if these had been killed."""
        for rank in ranks:
            if (peer := self._peers.get(rank)) is not None:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all stubs."""
        self._wake.close()
        self._thread.join()
        for each in (self._listener, self._awake, *self._peers.values()):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._awake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._awake:
                        return
                    if key.fileobj is self._listener:
                        self._begin(selector)
                    else:  # the stub has ended
                        selector.unregister(key.fileobj)
                        self._peers.pop(key.data).close()
                        self._kill(key.data)

    def _begin(self, selector: selectors.BaseSelector) -> None:
        if (accepted := accept(self._listener)) is None:
            return
        peer, files, (environment, *_) = accepted
        for file in files:
            os.close(file)
        rank = int(environment["OMPI_COMM_WORLD_RANK"])
        self._peers[rank] = peer
        selector.register(peer, selectors.EVENT_READ, rank)
        with contextlib.suppress(OSError):
            peer.sendall(rank_stub.LENGTH.pack(0))  # it has no process here
        self._start(rank, environment)
