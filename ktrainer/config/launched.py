"""What `ktrainer launch` was told on its command line and every rank must know.

It goes through the environment: a script need not take words `key=value` to be launched so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktrainer.config.healing import check_healing
from ktrainer.config.schema import Config

VARIABLE = "KTRAINER_WORLD"
_GRACE = "interrupt.grace"
_INTERFACE, _PORTS = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_port_"
_MPI_PORTS = range(61000, 65500)  # above those that Linux gives to who does not ask for one
SPARE = 64  # processes that may join one launch, in all: each has pipes of its own


def as_launched(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """`config` with the launcher's word on its `world` section, and on the grace at the end.

    Raises:
        ConfigError: the two do not go together.
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


def mpi_on_loopback() -> dict[str, str]:
    """The environment of ranks that talk over TCP within one host. MPI publishes their addresses on
    loopback alone, but listens on all; at these ports ranks know its sockets, and move them."""
    found = {_INTERFACE: "lo"}
    for ip in ("v4", "v6"):
        found[f"{_PORTS}min_{ip}"] = str(_MPI_PORTS.start)
        found[f"{_PORTS}range_{ip}"] = str(len(_MPI_PORTS))
    return found


def ports_on_loopback(environ: Mapping[str, str]) -> range:
    """Where MPI may listen on loopback only; empty if it may listen where it does."""
    return _MPI_PORTS if mpi_on_loopback().items() <= environ.items() else range(0)


def to_environment(world: Mapping[str, Any], grace: float | None = None) -> dict[str, str]:
    """The environment from which ranks learn these keys of the `world` section, and the `grace`
    (seconds) that they have to end in, if it was given."""
    told = dict(world) | ({} if grace is None else {_GRACE: grace})
    return {VARIABLE: json.dumps(told)} if told else {}
