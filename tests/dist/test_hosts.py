"""The hosts that tests make: names, links that are cut or slow, agents, and nothing left behind."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.harness.hosts import INTERFACE, Hosts, why_no_hosts

_SEND = "import socket; s = socket.create_connection(({!r}, 9999), 2); s.sendall(bytes({}))"
_SERVE = """
import socket
with socket.create_server(("", 9999)) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass
"""


def test_hosts_have_names_addresses_and_an_agent(hosts: Callable[[int], Hosts]) -> None:
    made = hosts(2)
    command = "hostname; echo $SECRET; pwd; ps -e | wc -l"
    secret_env = {"SECRET": "hidden"}
    done = made.run(0, made.agent, "-o", "A=b", made.names[1], command, env=secret_env)
    name, secret, folder, processes = done.stdout.splitlines()
    assert (name, secret, folder) == (made.names[1], "", "/root")
    assert int(processes) < 10, "the agent's processes have numbers of their own"
    failed = made.run(0, made.agent, "nowhere", "true")
    assert (failed.returncode, failed.stderr) == (255, "agent: unknown host nowhere\n")
    made.prelude(1, "export ANSWER=42")
    assert made.run(0, made.agent, made.names[1], "echo $ANSWER").stdout == "42\n"


def test_links_are_cut_mended_and_slow(
    hosts: Callable[[int], Hosts], within: Callable[..., None]
) -> None:
    made = hosts(2)
    server = made.start(1, "python3", "-c", _SERVE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def send(count: int) -> subprocess.CompletedProcess[str]:
        return made.run(0, "python3", "-c", _SEND.format(made.names[1], count))

    before = made.sent(0), made.received(1)
    assert send(1 << 20).returncode == 0
    # The last bytes may be in the socket's buffer still.
    within(20, lambda: made.sent(0) - before[0] > 1 << 20, "bytes sent")
    within(20, lambda: made.received(1) - before[1] > 1 << 20, "bytes received")
    assert made.sent(0) - before[0] < 1.2 * (1 << 20)
    assert made.received(1) - before[1] < 1.2 * (1 << 20)
    made.cut(1)
    assert "timed out" in send(1).stderr
    made.mend(1)
    assert send(1).returncode == 0
    made.slow(0, rate="8mbit")
    start, already = time.monotonic(), made.received(1)
    assert send(1 << 20).returncode == 0
    while made.received(1) - already < 1 << 20:
        assert time.monotonic() - start < 10
        time.sleep(0.01)
    # 1 MB/s, after a burst of 256 KiB.
    assert time.monotonic() - start > ((1 << 20) - (1 << 18)) / 1e6
    made.slow(0)


def test_a_cut_link_cuts_the_agent_over_the_network(
    hosts: Callable[[int], Hosts], within: Callable[..., None], tmp_path: Path
) -> None:
    made = hosts(2)
    words = (made.names[1], "cat; echo $ANSWER >&2; exit 7")
    made.prelude(1, "export ANSWER=42")
    done = made.run(0, made.network_agent, *words)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "42\n")
    cut, said = tmp_path / "cut", tmp_path / "said"
    command = f"echo up; until [ -e {cut} ]; do sleep 0.1; done; echo on; touch {said}; sleep 60"
    agent = made.start(0, made.network_agent, made.names[1], command)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "up\n"
    made.cut(1)
    cut.touch()
    within(30, said.exists)
    assert not select.select([agent.stdout], [], [], 0.5)[0]
    made.mend(1)
    assert agent.stdout.readline() == "on\n"


def test_a_killed_host_ends_what_the_agent_started(hosts: Callable[[int], Hosts]) -> None:
    made = hosts(2)
    agent = made.start(0, made.agent, made.names[1], "sleep 60")
    deadline = time.monotonic() + 5
    while len(made.pids(1)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    made.kill(1)
    assert agent.wait(5) != 0
    assert made.pids(1) == []
    assert "is down" in made.run(0, made.agent, made.names[1], "true").stderr
    made.boot(1)
    assert made.run(0, made.agent, made.names[1], "hostname").stdout == made.names[1] + "\n"


def test_nothing_is_left_of_hosts_whose_processes_still_run() -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    made = Hosts(1)
    process = made.start(0, "sleep", "60")
    assert INTERFACE in made.run(0, "ip", "link").stdout
    made.close()
    assert process.returncode == -9
    assert made.names[0] not in os.listdir("/var/run/netns")
    assert not Path("/etc/netns", made.names[0]).exists()
