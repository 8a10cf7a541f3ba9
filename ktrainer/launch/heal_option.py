"""`ktrainer run --heal`: the launch continues when ranks are lost, and others join."""

from __future__ import annotations

import argparse
from typing import Any

from ktrainer.config import Config
from ktrainer.config.launch_environment import mpi_on_interface
from ktrainer.errors import ConfigError

# What MPI prints about lost ranks and those that join; ktrainer reports both.
NOISE = (b"NBC_Progress: an error", b"dpm.c at line")
_MPIRUN = ("--with-ft", "ulfm")


def add_healing_arguments(parser: argparse.ArgumentParser, positive: Any) -> None:
    """Declare the options, which set keys of the `world` section."""
    group = parser.add_argument_group(
        "self-healing",
        "for backend=data_parallel with engine mpi; see the keys of `world`. With backend=pipeline "
        "--heal alone: the replicas of lost processes save the state of all before they end",
    )
    group.add_argument(
        "--heal",
        action="store_const",
        const=True,
        help="continue without lost processes (world.heal); with a pipeline, see above",
    )
    group.add_argument(
        "--replace",
        action="store_const",
        const=True,
        help="start another process in place of each lost one (world.replace)",
    )
    group.add_argument(
        "--min-n",
        type=positive,
        metavar="N",
        help="with fewer processes, save a checkpoint and end (world.min_size)",
    )
    group.add_argument(
        "--max-n",
        type=positive,
        metavar="N",
        help="grow to as many processes, with those that join (world.max_size)",
    )


def requested(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of `world` that the command line sets; any of them means `heal`, but for `--heal`
    taken back (False)."""
    given = {
        "heal": args.heal,
        "replace": args.replace,
        "min_size": args.min_n,
        "max_size": args.max_n,
    }
    found = {key: value for key, value in given.items() if value is not None}
    return {"heal": True, **found} if found else {}


def settings(args: argparse.Namespace, config: Config | None) -> dict[str, Any]:
    """The keys of `world` for all ranks, from the command line, then the configuration; empty
    without healing.

    Raises:
        ConfigError: a cluster of parameter servers, whose launcher does not use MPI; or more ranks
            wanted than are started.
    """
    found = requested(args)
    if config is not None and config.world.heal:
        world = config.world
        keys = ("heal", "replace", "min_size", "max_size")
        found = {**{key: getattr(world, key) for key in keys}, **found}
    if not found.get("heal"):
        return {}
    if args.workers is not None:
        raise ConfigError("--heal is for processes that MPI connects: give -n, not --workers")
    if (least := found.get("min_size") or 1) > args.ranks:
        raise ConfigError(
            f"{args.ranks} processes are started, but with fewer than {least} they would save a "
            f"checkpoint and end (--min-n, world.min_size): start at least {least}, or lower it"
        )
    return found


def mpirun_arguments(healing: dict[str, Any]) -> tuple[str, ...]:
    """Further arguments of mpirun."""
    return _MPIRUN if healing else ()


def mpi_settings(healing: dict[str, Any], loopback: bool) -> dict[str, str]:
    """Settings of MPI for processes that join: they use TCP, since shared memory is for processes
    that start together; on loopback unless the network was chosen."""
    joins = bool(healing.get("replace") or healing.get("max_size"))
    if not (joins and loopback):
        return {}
    return {"OMPI_MCA_btl": "self,sm,tcp", **mpi_on_interface()}
