"""Compare the hosts of a launch before anything starts: every difference by host, with its remedy.

The program of `host_probe` runs on all hosts at once, and on this one, whose answers are the
reference.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ktrainer.errors import SetupError
from ktrainer.launch import host_probe
from ktrainer.launch.host_differences import common_network, differences, unreachable_lines
from ktrainer.launch.hosts import PACKAGE, Host
from ktrainer.launch.mpirun_command import find_mpirun

ANSWER_SECONDS = 8.0  # for the agent to connect and the host to report
NETWORK_SECONDS = 5.0  # for the hosts to connect to one another
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "ktrainer")

# Words of the agent's message -> the remedy.
_AGENT_REMEDIES = {
    "permission denied": "let this user log in there without a password: ssh-copy-id {host}",
    "host key verification failed": "accept the host's key once: ssh {host} true",
    "connection refused": "start sshd there, or give its port: --rsh 'ssh -p PORT'",
    "timed out": "check that it is up, and that its firewall accepts the agent's port (ssh: 22)",
    "no route to host": "check that it is up and connected",
    "could not resolve": "add it to DNS or /etc/hosts",
}


class HostProbe:
    """The probe on one host.

    Args:
        name: the host.
        agent: words that run a command there; empty: it is this host.
    """

    def __init__(self, name: str, agent: Sequence[str]) -> None:
        self.name = name
        text = Path(host_probe.__file__).read_text()
        command = [sys.executable, "-c", f"import sys;exec(sys.stdin.read({len(text)}))"]
        words = [*agent, name, shlex.join(command)] if agent else command
        self._data = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._send(text)

    def ask(self, question: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Ask a question, and return the answer.

        Args:
            until: the deadline, by the monotonic clock.

        Raises:
            SetupError: there was none; says why.
        """
        self._send(json.dumps(question) + "\n")
        while True:
            line, newline, rest = self._data.partition(b"\n")
            if newline:
                self._data = rest
                if line.startswith(host_probe.PREFIX.encode()):
                    answer: dict[str, Any] = json.loads(line[len(host_probe.PREFIX) :])
                    return answer
                continue  # a greeting of the host's shell
            self._read(until)

    def close(self) -> None:
        """End the agent, and with it the probe."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the reader says why
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def _read(self, until: float) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select(
            [self._process.stdout], [], [], max(0.0, until - time.monotonic())
        )
        if not ready:
            raise SetupError(
                f"host {self.name}: no answer within {ANSWER_SECONDS:g} s. Check that the host is "
                f"up, and that `{' '.join(map(str, self._process.args[:2]))} true` returns at once "  # type: ignore[index]
                "without asking for anything"
            )
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise SetupError(self._why_it_ended())
        self._data += data

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        last = (text.splitlines() or [f"exit code {code}"])[-1]
        if code in (126, 127):
            return (
                f"host {self.name}: {sys.executable} cannot be run there ({last}); install the "
                "same Python environment at the same path"
            )
        for words, remedy in _AGENT_REMEDIES.items():
            if words in text.lower():
                return f"host {self.name}: {last}; {remedy.format(host=self.name)}"
        return f"host {self.name}: the remote agent failed with exit code {code}: {last}"


def check_hosts(
    hosts: Sequence[Host],
    agent: Sequence[str],
    addresses: Mapping[str, str],
    *,
    files: Sequence[str],
    folders: Mapping[str, Path],
    interface: str | None,
) -> str:
    """Compare all hosts, and return the network on which they reach one another: `10.1.2.0/24`.

    Args:
        agent: words of the remote agent.
        addresses: host name -> address.
        files: absolute paths of files that must be the same on all.
        folders: key of the configuration -> the folder that all hosts must share, or the nearest
            one above it that exists.
        interface: name of an interface or a network, if the user chose one.

    Raises:
        SetupError: they differ, or do not reach one another; one line for each host.
    """
    with contextlib.ExitStack() as stack:
        markers = {k: stack.enter_context(_marker(k, folder)) for k, folder in folders.items()}
        question = {
            "files": list(files),
            "folders": {key: (str(folder), markers[key]) for key, folder in folders.items()},
            "cwd": str(Path.cwd()),
            "package": str(PACKAGE),
            "distributions": _DISTRIBUTIONS,
            "mpirun": find_mpirun(),
        }
        own = stack.enter_context(contextlib.closing(HostProbe("this host", ())))
        until = time.monotonic() + ANSWER_SECONDS
        probes = [stack.enter_context(contextlib.closing(HostProbe(h.name, agent))) for h in hosts]
        began = time.time()
        here, *reports = _on_all([own, *probes], lambda _: question, until)
        waited = time.time() - began
        for probe, found in zip(probes, reports, strict=True):
            found["skew"] = _skew(found["time"], began, waited)
            found["address"] = addresses[probe.name]
        _raise_if(
            line
            for host, found in zip(hosts, reports, strict=True)
            for line in differences(host.name, here, found)
        )
        named = {host.name: found for host, found in zip(hosts, reports, strict=True)}
        network = common_network(named, interface, here)
        _check_reachable(probes, named, network)
    return network


@contextlib.contextmanager
def _marker(key: str, folder: Path) -> Any:
    """Path of a file in the folder of this key that every host must see."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ktrainer-shared-") as file:
            yield file.name
    except OSError as error:
        if error.filename is None or ".ktrainer-shared-" not in str(error.filename):
            raise
        raise SetupError(
            f"cannot write to {folder} on this host: {error.strerror}; grant write access, or "
            f"choose another folder with {key}"
        ) from None


def _on_all(
    probes: Sequence[HostProbe], question: Callable[[HostProbe], Mapping[str, Any]], until: float
) -> list[dict[str, Any]]:
    """Ask all hosts at once; raise the errors of all that do not answer."""
    with ThreadPoolExecutor(len(probes)) as pool:
        asked = [pool.submit(probe.ask, question(probe), until) for probe in probes]
    _raise_if(str(error) for each in asked if (error := each.exception()) is not None)
    return [each.result() for each in asked]


def _raise_if(lines: Any) -> None:
    if found := list(lines):
        raise SetupError("\n".join(found))


def _skew(there: float, began: float, waited: float) -> float:
    """Seconds that a clock is ahead of this host's; 0 within the time that asking took."""
    return 0.0 if began <= there <= began + waited else there - began


def _check_reachable(
    probes: Sequence[HostProbe], reports: Mapping[str, Mapping[str, Any]], network: str
) -> None:
    """Connect every host to every other one by TCP on the network."""
    if len(probes) == 1:
        return
    inside = ipaddress.ip_network(network)
    own = {
        name: next(a for _, a, _ in found["interfaces"] if ipaddress.ip_address(a) in inside)
        for name, found in reports.items()
    }
    until = time.monotonic() + NETWORK_SECONDS
    answers = _on_all(probes, lambda probe: {"listen": own[probe.name]}, until)
    peers = {p.name: (own[p.name], a["port"]) for p, a in zip(probes, answers, strict=True)}

    def others(probe: HostProbe) -> dict[str, Any]:
        return {"peers": {name: peer for name, peer in peers.items() if name != probe.name}}

    answers = _on_all(probes, others, until)
    failed = {p.name: a["unreachable"] for p, a in zip(probes, answers, strict=True)}
    _raise_if(unreachable_lines(failed, own))
