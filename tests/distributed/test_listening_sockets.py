"""Listening sockets are moved to one interface without the loss of a connection."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ktrainer.distributed import listening_sockets
from ktrainer.distributed.listening_sockets import ListeningSocket


@pytest.fixture
def library() -> Iterator[tuple[socket.socket, select.epoll]]:
    """A socket that listens on all interfaces, and is watched as MPI and gRPC do it."""
    with watched_socket("0.0.0.0") as found:
        yield found


@contextlib.contextmanager
def watched_socket(address: str, **options: Any) -> Iterator[tuple[socket.socket, select.epoll]]:
    server = socket.create_server((address, 0), **options)
    with server as listener, contextlib.closing(select.epoll()) as it:
        listener.setblocking(False)
        it.register(listener, select.EPOLLIN)
        yield listener, it


@pytest.mark.parametrize(
    ("everywhere", "options"),
    [
        ("0.0.0.0", {}),
        pytest.param(
            "::",
            {"family": socket.AF_INET6, "dualstack_ipv6": True},
            marks=pytest.mark.skipif(
                not socket.has_dualstack_ipv6(), reason="this host has no IPv6 beside IPv4"
            ),
        ),
    ],
)
def test_a_socket_listens_at_an_address_once_it_was_moved_there(
    everywhere: str, options: dict[str, Any]
) -> None:
    with watched_socket(everywhere, **options) as (listener, _):
        port = listener.getsockname()[1]
        assert not listening_sockets.listens_at(port, "127.0.0.1")
        assert listening_sockets.narrow(ListeningSocket(listener.fileno(), port))
        assert listening_sockets.listens_at(port, "127.0.0.1")
        assert not listening_sockets.listens_at(1, "127.0.0.1")


def test_a_socket_on_all_interfaces_beside_one_at_an_address_counts() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as here:
        port = here.getsockname()[1]
        assert listening_sockets.listens_at(port, "127.0.0.1")
        with socket.create_server(("0.0.0.0", port), reuse_port=True):
            assert not listening_sockets.listens_at(port, "127.0.0.1")


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
