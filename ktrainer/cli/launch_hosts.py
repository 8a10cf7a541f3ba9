"""The hosts of `ktrainer run --hosts a:2,b:2`: named, checked and connected before ranks start."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ktrainer.config import Config, parse_known_cli
from ktrainer.config.launch_environment import address_in
from ktrainer.errors import ConfigError
from ktrainer.launch import hosts as host_list
from ktrainer.launch.host_check import check_hosts
from ktrainer.launch.host_connections import HostConnections
from ktrainer.launch.hosts import Host


@dataclass(frozen=True)
class ConnectedHosts:
    """Hosts that have passed all checks.

    Attributes:
        mpirun_arguments: make mpirun start its daemons there.
        mpi_settings: environment of the ranks, which keeps MPI on the hosts' network.
        address: of this host in that network.
        connections: carry the ranks' output.
        shared: a folder that all hosts share.
    """

    mpirun_arguments: list[str]
    mpi_settings: dict[str, str]
    address: str
    connections: HostConnections
    shared: Path


def requested_hosts(args: argparse.Namespace) -> list[Host]:
    """The hosts of `--hosts` or `--hostfile`, with `args.ranks` processes on them, which is set.

    Raises:
        ConfigError: they contradict other options.
    """
    if args.hosts is None and args.hostfile is None:
        if args.rsh is not None or args.interface is not None:
            raise ConfigError(
                "--rsh and --interface are for --hosts or --hostfile: give one of them"
            )
        return []
    if args.hosts is not None and args.hostfile is not None:
        raise ConfigError("--hosts and --hostfile both name the hosts: give one of them")
    for option in ("workers", "servers", "replace", "max_n"):
        if getattr(args, option, None):
            raise ConfigError(
                f"--{option.replace('_', '-')} works on one host only; leave it out, or --hosts"
            )
    named = args.hosts
    found = (
        host_list.read_hostfile(args.hostfile) if named is None else host_list.parse_hosts(named)
    )
    chosen = host_list.with_ranks(found, args.ranks)
    args.ranks = sum(host.slots for host in chosen)
    return chosen


def connect(
    args: argparse.Namespace,
    hosts: Sequence[Host],
    config: Config | None,
    threads: int,
    heal: Mapping[str, Any],
) -> ConnectedHosts:
    """Check the hosts, and find the network between them.

    Args:
        threads: of each rank.
        heal: the keys of `world` that make the ranks heal; empty: they do not.

    Raises:
        ConfigError: the configuration asks for what works on one host only.
        SetupError: they differ, or do not reach one another.
    """
    for key in ("replace", "max_size"):
        if heal.get(key):
            raise ConfigError(
                "works on one host only; leave it out, or --hosts", path=f"world.{key}"
            )
    rsh = args.rsh or host_list.DEFAULT_RSH
    agent = host_list.check_agent(rsh)
    addresses = host_list.resolve(hosts)
    path = parse_known_cli(args.args)[0] if args.check else None
    files = [os.path.abspath(each) for each in (args.script, path) if each is not None]
    folders = {"run.dir": _existing((config and config.run.dir) or "runs")}
    if config is not None and config.checkpoint.dir is not None:
        folders["checkpoint.dir"] = _existing(config.checkpoint.dir)
    network = check_hosts(
        hosts, agent, addresses, files=files, folders=folders, interface=args.interface
    )
    here = [host.name for host in hosts if _is_here(addresses[host.name])]
    starts = bool(heal)
    return ConnectedHosts(
        [] if starts else host_list.mpirun_arguments(hosts, agent, network),
        host_list.mpi_settings(network, starts),
        address_in(network),
        HostConnections(hosts, agent, here, bind=args.bind, threads=threads, start_ranks=starts),
        folders["run.dir"],
    )


def _is_here(address: str) -> bool:
    """Return whether an address is one of this host; Debian gives its own name 127.0.1.1."""
    own = {a.address for each in psutil.net_if_addrs().values() for a in each}
    return address in own or ipaddress.ip_address(address).is_loopback


def _existing(folder: str) -> Path:
    """The folder, or the nearest one above it that exists; "{time}" may stand in its name."""
    path = Path(folder).expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())
