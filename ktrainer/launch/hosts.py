"""The hosts of a launch: `--hosts a:2,b:2` or `--hostfile`, and how to run a command on them."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ktrainer.config.launch_environment import mpi_on_interface
from ktrainer.errors import ConfigError, SetupError

DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
LOST_SECONDS = 4.0
_DISCARD = 9  # a port on which no one listens
_CONNECTIONS = "OMPI_MCA_btl_tcp_links"  # between ranks of two hosts
PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    """A host, and how many processes it gets."""

    name: str
    slots: int = 1


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `a:2,b:2`; without a number, one process.

    Raises:
        ConfigError: an entry is no host with a number, or a host comes twice.
    """
    return _distinct(
        [_host(entry, *entry.partition(":")[::2], "--hosts") for entry in text.split(",")]
    )


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file as mpirun reads it: `NAME slots=N` in each line, comments after `#`.

    Raises:
        ConfigError: there is no such file, or a line is something else.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the hostfile: {error}", path="--hostfile") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            key, _, slots = words[1].partition("=") if len(words) > 1 else ("slots", "", "")
            known = key == "slots" and len(words) <= 2 and (len(words) == 1 or slots)
            hosts.append(_host(line, words[0], slots if known else "?", f"{path}, line {number}"))
    if not hosts:
        raise ConfigError(f"{path} names no host; write one a line, as `node1 slots=2`")
    return _distinct(hosts)


def _host(entry: str, name: str, slots: str, where: str) -> Host:
    fits = _NAME.fullmatch(name) and (not slots or (slots.isdecimal() and int(slots) > 0))
    if not fits or entry.endswith(":"):
        raise ConfigError(
            f"{where}: {entry.strip()!r} is no host with a number of processes from 1; write "
            "--hosts node1:2,node2:2, or in a hostfile `node1 slots=2` on each line"
        )
    return Host(name, int(slots or 1))


def _distinct(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"host {name} is named twice; name each host once, with the number of all its "
                f"processes: {name}:{sum(h.slots for h in hosts if h.name == name)}"
            )
    return hosts


def with_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """The hosts with exactly `ranks` processes, the first ones filled first; None: all slots.

    Raises:
        ConfigError: there are fewer slots.
    """
    slots = sum(host.slots for host in hosts)
    if ranks is not None and ranks > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"-n {ranks} is more than the {slots} slots of {listed}; raise the number of a host "
            "there, or name more hosts"
        )
    left, chosen = slots if ranks is None else ranks, []
    for host in hosts:
        if left > 0:
            chosen.append(Host(host.name, min(left, host.slots)))
        left -= host.slots
    return chosen


def check_agent(rsh: str) -> list[str]:
    """The words of the remote agent.

    Raises:
        SetupError: there is no such program, or it cannot be executed.
    """
    words = shlex.split(rsh)
    program = words[0] if words else ""
    if not program or (shutil.which(program) is None and not os.path.exists(program)):
        raise SetupError(
            f"there is no remote agent {program!r} on {socket.gethostname()}; install it (Debian: "
            "apt-get install openssh-client), or give another one with --rsh"
        )
    if shutil.which(program) is None:
        raise SetupError(
            f"the remote agent {program} on {socket.gethostname()} is not executable: "
            f"chmod +x {program}"
        )
    return words


def resolve(hosts: Sequence[Host]) -> dict[str, str]:
    """Host name -> IPv4 address.

    Raises:
        SetupError: a name does not resolve.
    """
    found = {}
    for host in hosts:
        try:
            found[host.name] = socket.getaddrinfo(host.name, None, socket.AF_INET)[0][4][0]
        except OSError as error:
            raise SetupError(
                f"host {host.name}: the name does not resolve on {socket.gethostname()} "
                f"({error.strerror}); correct it, or add it to DNS or /etc/hosts on every host"
            ) from None
    return {name: str(address) for name, address in found.items()}


def lost_hosts(names: Sequence[str], rsh: Sequence[str], silent: Sequence[str] = ()) -> list[str]:
    """Those of the hosts that cannot be reached: the remote agent cannot run a command there, or
    packets do not arrive. Takes up to one and a half `LOST_SECONDS`.

    Args:
        silent: the hosts that were `silent_hosts` when they were reached, which says nothing.
    """
    return _without(names, lambda name: (name in silent or _answers(name)) and _runs(name, rsh))


def silent_hosts(names: Sequence[str]) -> list[str]:
    """Those of the hosts from which no packet comes back, as firewalls may have it. Takes up to
    half of `LOST_SECONDS`."""
    return _without(names, _answers)


def _without(names: Sequence[str], holds: Callable[[str], bool]) -> list[str]:
    """Those of the names for which a condition, checked for all at once, does not hold."""
    if not names:
        return []
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(holds, names))
    return [name for name, held in zip(names, found, strict=True) if not held]


def _runs(name: str, rsh: Sequence[str]) -> bool:
    nowhere = subprocess.DEVNULL
    words = [*rsh, name, "true"]
    try:
        done = subprocess.run(
            words, stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=LOST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _answers(name: str) -> bool:
    """Return whether packets arrive: a connection is accepted or refused, or a firewall says no."""
    try:
        socket.create_connection((name, _DISCARD), LOST_SECONDS / 2).close()
    except OSError as error:
        return error.errno in (errno.ECONNREFUSED, errno.EACCES, errno.EPERM)
    return True


def python_command(module: str, *words: str) -> list[str]:
    """The command that runs a module of this package on a host, by the same Python."""
    path = f"PYTHONPATH={PACKAGE.parent}"
    return ["/usr/bin/env", path, sys.executable, "-m", module, *words]


def mpi_settings(network: str, without_daemons: bool) -> dict[str, str]:
    """The environment that keeps MPI of mpirun and of all ranks on one network.

    Args:
        network: as `10.1.2.0/24`.
        without_daemons: mpirun starts stubs of ranks on its own host. To it all ranks are there:
            they connect to it by TCP, and to one another, as there is no memory that they share.
    """
    found = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", **mpi_on_interface(network)}
    # Over one connection Open MPI's messages go in one direction at a time.
    found[_CONNECTIONS] = os.environ.get(_CONNECTIONS, "2")
    if without_daemons:
        found |= {
            "OMPI_MCA_btl": "self,tcp",
            "PMIX_MCA_gds": "hash",  # else ranks get what others have published from a shared file
            "PMIX_MCA_ptl_tcp_if_include": network,
            "PMIX_MCA_ptl_tcp_remote_connections": "1",
            "PMIX_MCA_ptl_tcp_disable_ipv6": "1",
            "PRTE_MCA_prte_if_include": network,
        }
    return found


def mpirun_arguments(hosts: Sequence[Host], rsh: Sequence[str], network: str) -> list[str]:
    """Arguments with which mpirun starts its daemons on these hosts and uses one network only.

    Args:
        network: as `10.1.2.0/24`.
    """
    daemon = python_command("ktrainer.launch.mpirun_network", network)
    prted = str(Path(sys.executable).with_name("prted"))
    agent = [*daemon, prted if os.path.exists(prted) else "prted"]
    return [
        *("--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)),
        *("--prtemca", "plm_ssh_agent", " ".join(rsh)),
        *("--prtemca", "prte_launch_agent", " ".join(agent)),
        *("--prtemca", "prte_if_include", network),
        # Continued after a stop (see mpirun_network), it would signal daemons that do not run yet.
        *("--prtemca", "ess_base_forward_signals", "none"),
        *("-x", "PYTHONPATH", "-x", "PYTHONHASHSEED"),
    ]
