"""Listening sockets are moved to one interface without the loss of a connection."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from ktrainer.distributed import listening_sockets
from ktrainer.distributed.listening_sockets import ListeningSocket


@pytest.fixture
def library() -> Iterator[tuple[socket.socket, select.epoll]]:
    """A socket that listens on all interfaces, and is watched as MPI and gRPC do it."""
    with socket.create_server(("0.0.0.0", 0)) as listener, contextlib.closing(select.epoll()) as it:
        listener.setblocking(False)
        it.register(listener, select.EPOLLIN)
        yield listener, it


def test_a_connection_that_waits_is_not_lost(library: tuple[socket.socket, select.epoll]) -> None:
    listener, watched = library
    port = listener.getsockname()[1]
    here = ListeningSocket(listener.fileno(), port)
    with socket.create_connection(("127.0.0.1", port), 5) as early:
        with pytest.raises(OSError, match="waits to be accepted"):
            listening_sockets.narrow(here)
        assert watched.poll(5) == [(listener.fileno(), select.EPOLLIN)]
        accepted, _ = listener.accept()
        with accepted:
            assert listening_sockets.narrow(here)
            early.sendall(b"kept")
            assert accepted.recv(4) == b"kept"
    assert listener.getsockname() == ("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), 5) as late:
        assert watched.poll(5) == [(listener.fileno(), select.EPOLLIN)]
        accepted, _ = listener.accept()
        with accepted:
            late.sendall(b"new")
            assert accepted.recv(3) == b"new"
