"""Hosts on one machine: network namespaces on a bridge, each with an address and a name of its own.

    test process                bridge kb4f2a1
    ┌────────────────┐   ┌──────────┴──────────┐
    │ hosts(2)       │   │ eth0 10.200.33.1    │ eth0 10.200.33.2
    │  .run(0, ...)  │ ┌─┴────────────┐ ┌──────┴───────┐
    │  .agent        │ │ k4f2a1h1     │ │ k4f2a1h2     │   network, host name, process numbers,
    └────────────────┘ └──────────────┘ └──────────────┘   TMPDIR and /dev/shm of its own

The launcher runs on a host, since names resolve there only. The agent hides the environment and the
working folder, as ssh does. The hosts share the file system (but for TMPDIR, /dev/shm and what a
host's `prelude` mounts), the clock and the processors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.dist.harness import leaks

INTERFACE = "eth0"
_MAX_HOSTS = 200
_SETS = itertools.count()
_NAMES = Path("/etc/netns")  # NAME/hosts there is /etc/hosts for `ip netns exec NAME`

# HOST COMMAND...; words before HOST are options of ssh. The command's words are joined and read by
# a shell, as ssh has it. All agents of a host share its first process's namespaces.
_AGENT = """#!/bin/sh
while :; do case "$1" in -[opliFJ]) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
[ -d "{folder}/$host" ] || {{ echo "agent: unknown host $host" >&2; exit 255; }}
first=$(cat "{folder}/$host/pid") || {{ echo "agent: $host is down" >&2; exit 255; }}
export KT_COMMAND="$*"
exec nsenter --target "$first" --net --uts --ipc --pid --mount unshare --mount \
  env -i HOME=/root USER=root LOGNAME=root SHELL=/bin/sh LANG=C.UTF-8 \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TMPDIR="{folder}/$host/tmp" \
  sh -c '. "$0"; cd "$HOME"; exec sh -c "$1"' "{folder}/$host/prelude" "$KT_COMMAND"
"""
# The same, but the command's input and output go over the hosts' network, and are cut with a link.
_NETWORK_AGENT = r"""#!{python} -IS
import os, socket, subprocess, sys, threading, time
FOLDER = "{folder}"
ENTER = '. "$0"; cd "$HOME"; exec sh -c "$1"'
CONNECT = (
    "import os, socket, sys\n"
    "for number in range(3):\n"
    "    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)\n"
    "    link.settimeout(None)\n"
    "    link.send(bytes([number]))\n"
    "    os.dup2(link.fileno(), number)\n"
    "    link.close()\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


def fail(text):
    print("agent: " + text, file=sys.stderr)
    sys.exit(255)


def copy(read, write, end):
    try:
        while data := read(1 << 16):
            while data:
                data = data[write(data):]
    except OSError:
        pass
    end()


def main(words):
    while words[0].startswith("-"):
        del words[:2 if words[0][1] in "opliFJ" and len(words[0]) == 2 else 1]
    host, command = words[0], " ".join(words[1:])
    own = FOLDER + "/" + host
    if not os.path.isdir(own):
        fail("unknown host " + host)
    try:
        first = open(own + "/pid").read()
    except FileNotFoundError:
        fail(host + " is down")
    listener = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    address, port = listener.getsockname()
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    login = ("HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/sh", "LANG=C.UTF-8")
    process = subprocess.Popen(
        ["nsenter", "--target", first, "--net", "--uts", "--ipc", "--pid", "--mount",
         "unshare", "--mount", "env", "-i", *login, "PATH=" + path, "TMPDIR=" + own + "/tmp",
         sys.executable, "-IS", "-c", CONNECT, address, str(port),
         "sh", "-c", ENTER, own + "/prelude", command],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    listener.settimeout(0.1)
    links, until = dict(), time.monotonic() + 6
    while len(links) < 3 and process.poll() is None and time.monotonic() < until:
        try:
            link, _ = listener.accept()
            link.settimeout(None)
            links[link.recv(1)[0]] = link
        except (OSError, IndexError):
            pass
    if len(links) < 3:
        process.kill()
        fail("connect to host " + host + ": Connection timed out")
    copies = [(lambda size: os.read(0, size), links[0].send, lambda: close(links[0]))]
    copies += [(links[n].recv, lambda data, n=n: os.write(n, data), lambda: None) for n in (1, 2)]
    threads = [threading.Thread(target=copy, args=each, daemon=True) for each in copies]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    code = process.wait()
    os._exit(code if code >= 0 else 255)


def close(link):
    try:
        link.shutdown(socket.SHUT_WR)
    except OSError:
        pass


main(sys.argv[1:])
"""
# The first process of a host; its end ends all that agents have started. It reaps orphans.
_BOOT = "echo up; while :; do sleep 3600 & wait; done"
_ENTER = """#!/bin/sh
more=; while [ "$1" != -- ]; do more="$more $1"; shift; done; shift
export TMPDIR="{own}/tmp"
exec ip netns exec {name} unshare --uts --mount --ipc $more sh -c '
hostname {name}; mount --bind "{own}/shm" /dev/shm; exec "$@"' sh "$@"
"""


@cache
def why_no_hosts() -> str | None:
    """The reason why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    if absent := [
        tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None
    ]:
        return f"hosts need {' and '.join(absent)} (Debian's packages iproute2, util-linux)"
    name = f"k{os.getpid():x}try"
    tried = _call("ip", "netns", "add", name, check=False)
    _call("ip", "netns", "del", name, check=False)
    return f"`ip netns add` fails: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """`count` hosts; `close` ends their processes and removes all of it.

    Attributes:
        names: host names; each resolves on every host.
        addresses: IPv4 addresses on `eth0`, by host.
        agent: path of the remote agent: `AGENT HOST COMMAND...`, for mpirun and for `--rsh`. It has
            a network of its own, so to speak: a cut link does not cut it.
        network_agent: one over the hosts' network.
        folder: holds all files of the hosts.
    """

    def __init__(self, count: int) -> None:
        assert 1 <= count <= _MAX_HOSTS
        number = next(_SETS)
        self._id = f"{os.getpid():x}" + (f"x{number:x}" if number else "")
        net = (os.getpid() + number * 7919) % (127 * 250)
        self.addresses = [f"10.{128 + net // 250}.{net % 250}.{i + 1}" for i in range(count)]
        self.names = [f"k{self._id}h{i + 1}" for i in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self.agent = self.folder / "agent"
        self.network_agent = self.folder / "network_agent"
        self._bridge = f"kb{self._id}"
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, words: Sequence[object]) -> list[str]:
        """The command line that runs `words` on a host, in this environment and folder."""
        prelude = self.folder / self.names[host] / "prelude"
        return [
            *(str(self.folder / self.names[host] / "enter"), "--"),
            *("sh", "-c", '. "$0"; exec "$@"', str(prelude), *map(str, words)),
        ]

    def run(
        self,
        host: int,
        *words: object,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, its output captured as text.

        After `timeout` seconds all hosts boot again, and the test fails.
        """
        process = self.start(host, *words, env=env, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = process.communicate()
            for other in range(len(self.names)):
                self.boot(other)  # for the next test
            raise AssertionError(
                f"{' '.join(map(str, words))} took over {timeout:g} s on {self.names[host]}\n"
                f"--- stdout\n{out}\n--- stderr\n{err}"
            ) from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(
        self,
        host: int,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host; `close` ends it."""
        process = subprocess.Popen(
            self.command(host, words),
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def prelude(self, host: int, shell: str) -> None:
        """Run shell commands before each command on a host, by the agent too.

        They run in the command's own mount namespace, so that what they mount is there alone.
        """
        (self.folder / self.names[host] / "prelude").write_text(shell + "\n")

    def ip(self, host: int, *words: object) -> None:
        """`ip WORDS...` in a host's network namespace."""
        _call("ip", "-n", self.names[host], *map(str, words))

    def cut(self, host: int) -> None:
        """Cut a host's link: nothing arrives there or comes from there, and nobody is told."""
        _call("ip", "link", "set", self._link(host), "nomaster")

    def mend(self, host: int) -> None:
        """Connect a host's link again."""
        _call("ip", "link", "set", self._link(host), "master", self._bridge)
        for name in self.names:  # who was looked for in vain is looked for again at once
            _call("ip", "-n", name, "neigh", "flush", "all", check=False)

    def slow(
        self, host: int, *, rate: str = "", burst: str = "256kb", delay: str = "", loss: str = ""
    ) -> None:
        """Make what a host sends slow by `tc`; without arguments, as fast as before.

        Skips the test for a `delay` or `loss` where the kernel has no netem.

        Args:
            rate: as `100mbit`.
            burst: what a rate alone lets pass at once after a pause.
            delay: as `20ms`.
            loss: as `1%`.
        """
        tc = ("tc", "-n", self.names[host], "qdisc")
        _call(*tc, "del", "dev", INTERFACE, "root", check=False)
        given = {"delay": delay, "loss": loss, "rate": rate}
        words = [word for key, value in given.items() if value for word in (key, value)]
        if delay or loss:
            netem = ("netem", "limit", "100000", *words)
            done = _call(*tc, "add", "dev", INTERFACE, "root", *netem, check=False)
            if "qdisc kind is unknown" in done.stderr:
                pytest.skip("this kernel has no netem (CONFIG_NET_SCH_NETEM), only rates")
            assert done.returncode == 0, done.stderr
        elif rate:
            shaper = ("tbf", "rate", rate, "burst", burst, "latency", "400ms")
            _call(*tc, "add", "dev", INTERFACE, "root", *shaper)

    def sent(self, host: int) -> int:
        """Bytes that a host has sent over its link, by the interface's counter."""
        return self._counter(host, "tx_bytes")

    def received(self, host: int) -> int:
        """Bytes that a host has received over its link, by the interface's counter."""
        return self._counter(host, "rx_bytes")

    def pids(self, host: int) -> list[int]:
        """Numbers, in the test's process namespace, of all processes of a host; one that is up and
        idle has three, and those that `WarmPython` forks."""
        done = _call("ip", "netns", "pids", self.names[host], check=False)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, host: int) -> None:
        """Kill every process of a host, agents and MPI's daemon included; it stays down.

        A host without power answers nothing, not even that its connections are closed: `cut` its
        link first for that.
        """
        (self.folder / self.names[host] / "pid").unlink(missing_ok=True)
        deadline = time.monotonic() + 5.0
        while (pids := self.pids(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def boot(self, host: int) -> None:
        """Start a host, at first or after `kill`."""
        enter = str(self.folder / self.names[host] / "enter")
        words = ("--pid", "--fork", "--mount-proc", "--kill-child", "--", "sh", "-c", _BOOT)
        first = self.serve(enter, *words)
        children = Path(f"/proc/{first}/task/{first}/children").read_text()
        (self.folder / self.names[host] / "pid").write_text(children.strip())

    def first(self, host: int) -> int:
        """Number, in the test's process namespace, of the first process of a host that is up."""
        return int((self.folder / self.names[host] / "pid").read_text())

    def serve(self, *words: object) -> int:
        """Start a command that enters a host, prints "up" there, and stays until the host is
        killed; returns its process id."""
        process = subprocess.Popen(
            list(map(str, words)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        assert process.stdout is not None
        leaks.expect_process(process.pid)
        leaks.expect_file(process.stdout.fileno())
        assert process.stdout.readline() == "up\n"
        return process.pid

    def kill_all(self) -> None:
        """Kill every process of all hosts."""
        for host in range(len(self.names)):
            self.kill(host)

    def close(self) -> None:
        """End all processes, and remove namespaces, links and files.

        Raises:
            AssertionError: something is left.
        """
        self.kill_all()
        for process in self._started:
            process.communicate()
        for name in self.names:
            _call("ip", "netns", "del", name, check=False)
            shutil.rmtree(_NAMES / name, ignore_errors=True)
        for link in [self._link(host) for host in range(len(self.names))] + [self._bridge]:
            _call("ip", "link", "del", link, check=False)  # a namespace's own go seconds later
        shutil.rmtree(self.folder, ignore_errors=True)
        left = self._left()
        assert not left, f"hosts left behind: {left}"

    def _make(self) -> None:
        python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
        networked = _NETWORK_AGENT.replace("{python}", python)
        self.agent.write_text(_AGENT.format(folder=self.folder))
        self.network_agent.write_text(networked.replace("{folder}", str(self.folder)))
        for agent in (self.agent, self.network_agent):
            agent.chmod(0o755)
        _call("ip", "link", "add", self._bridge, "type", "bridge")
        _call("ip", "link", "set", self._bridge, "up")
        pairs = zip(self.addresses, self.names, strict=True)
        table = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs)
        for host, name in enumerate(self.names):
            own = self.folder / name
            for part in ("tmp", "shm"):
                (own / part).mkdir(parents=True)
            (own / "prelude").touch()
            (own / "enter").write_text(_ENTER.format(name=name, own=own))
            (own / "enter").chmod(0o755)
            (_NAMES / name).mkdir(parents=True)
            (_NAMES / name / "hosts").write_text(table)
            self._connect(host, name)
            self.boot(host)

    def _connect(self, host: int, name: str) -> None:
        link = self._link(host)
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _call("ip", "link", "set", link, "master", self._bridge)
        _call("ip", "link", "set", link, "up")
        self.ip(host, "addr", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        self.ip(host, "link", "set", INTERFACE, "up")
        self.ip(host, "link", "set", "lo", "up")

    def _counter(self, host: int, name: str) -> int:
        path = f"/sys/class/net/{INTERFACE}/statistics/{name}"
        return int(_call("ip", "netns", "exec", self.names[host], "cat", path).stdout)

    def _link(self, host: int) -> str:
        return f"kv{self._id}-{host + 1}"

    def _left(self) -> list[str]:
        listed = _call("ip", "netns", "list").stdout
        spaces = {line.split()[0] for line in listed.splitlines() if line}
        left = [name for name in self.names if name in spaces or (_NAMES / name).exists()]
        links = _call("ip", "-o", "link", "show").stdout
        left += [self._bridge] if f" {self._bridge}:" in links else []
        left += [name for i, name in enumerate(self.names) if f" {self._link(i)}@" in links]
        return left + ([str(self.folder)] if self.folder.exists() else [])


def _call(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done
