"""Options of `ktrainer run` that every rank must know, passed through the environment.

A script need not accept `key=value` words to be launched with them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from ktrainer.config.fault_tolerance_checks import check_healing
from ktrainer.config.schema import Config, WorldConfig
from ktrainer.errors import SetupError

VARIABLE = "KTRAINER_WORLD"
JOINED_SIZE = "KTRAINER_JOINED_SIZE"  # in a process that joins others: how many ranks with it
NETWORK = "KTRAINER_NETWORK"  # of a launch over several hosts, as 10.1.2.0/24
RELAYED = "KTRAINER_RELAYED"  # in ranks that the relay of their host starts, in the place of mpirun
LOOPBACK = "127.0.0.1"
_GRACE = "interrupt.grace"
_INTERFACE, _PORTS = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_port_"
_MPI_PORTS = range(61000, 65500)  # above Linux's ephemeral ports
MAY_JOIN = 64  # the most processes that may join one launch: each has pipes of its own


def as_launched(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """`config` with the launcher's values for `world` and `trainer.interrupt.grace`.

    Raises:
        ConfigError: they contradict the configuration.
    """
    told = environ.get(VARIABLE)
    if not told:
        return config
    world = json.loads(told)
    if (grace := world.pop(_GRACE, None)) is not None:
        interrupt = replace(config.trainer.interrupt, grace=grace)
        config = config.with_changes(trainer=replace(config.trainer, interrupt=interrupt))
    config = config.with_changes(world=replace(config.world, **world))
    check_healing(config)
    return config


def launched_world(environ: Mapping[str, str] = os.environ) -> WorldConfig:
    """The keys of `world` that the launcher was given, for scripts without a configuration."""
    given = json.loads(environ.get(VARIABLE) or "{}")
    return WorldConfig(**{key: value for key, value in given.items() if key != _GRACE})


def mpi_on_interface(interface: str = "lo") -> dict[str, str]:
    """The environment of ranks that use TCP on one interface: within one host loopback, else that
    in a network as `10.1.2.0/24`. MPI publishes their addresses there only, but listens on all
    interfaces; ranks find its sockets by these ports, and rebind them."""
    found = {_INTERFACE: interface} | ({NETWORK: interface} if interface != "lo" else {})
    for ip in ("v4", "v6"):
        found[f"{_PORTS}min_{ip}"] = str(_MPI_PORTS.start)
        found[f"{_PORTS}range_{ip}"] = str(len(_MPI_PORTS))
    return found


def ports_on_interface(environ: Mapping[str, str] = os.environ) -> range:
    """The ports that must listen on one interface only; empty without `mpi_on_interface`."""
    wanted = mpi_on_interface(environ.get(_INTERFACE, "lo"))
    return _MPI_PORTS if wanted.items() <= environ.items() else range(0)


def listening_address(environ: Mapping[str, str] = os.environ) -> str:
    """The IPv4 address on which ranks listen: of this host in the network of a launch over several
    hosts, else of the loopback interface."""
    network = environ.get(NETWORK)  # may be set for another launch than one within this host
    return LOOPBACK if environ.get(_INTERFACE) == "lo" or not network else address_in(network)


def address_in(network: str) -> str:
    """This host's IPv4 address in a network as `10.1.2.0/24`.

    Raises:
        SetupError: it has none, or that is no network.
    """
    try:
        inside = ipaddress.ip_network(network)
    except ValueError as error:
        raise SetupError(f"{network!r} is no network: {error}; write it as 10.1.2.0/24") from None
    addresses = [a for each in psutil.net_if_addrs().values() for a in each]
    for each in addresses:
        if each.family == socket.AF_INET and ipaddress.ip_address(each.address) in inside:
            return str(each.address)
    raise SetupError(
        f"host {socket.gethostname()} has no address in {network} any more; connect the interface "
        "again, or choose another network with --interface"
    )


def to_environment(world: Mapping[str, Any], grace: float | None = None) -> dict[str, str]:
    """The environment that passes these keys of `world`, and `grace` (seconds), to the ranks."""
    told = dict(world) | ({} if grace is None else {_GRACE: grace})
    return {VARIABLE: json.dumps(told)} if told else {}
