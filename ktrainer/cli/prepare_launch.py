"""How the ranks of `ktrainer run` are started: derived from its options, the keys of the script's
configuration, and the hosts."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktrainer.cli import launch_hosts
from ktrainer.cli.launch_config import checked_config, naming_the_separator, split_words
from ktrainer.cli.launch_options import THREADS
from ktrainer.config import Config
from ktrainer.config.launch_environment import LOOPBACK, MAY_JOIN, to_environment
from ktrainer.config.watch_checks import require_trackers
from ktrainer.errors import CheckpointError, ConfigError
from ktrainer.launch import heal_option, mpirun_command
from ktrainer.launch.host_connections import HostConnections
from ktrainer.launch.hosts import Host
from ktrainer.launch.mpirun_command import HASH_SEED, rank_environment
from ktrainer.launch.rank_channel import Options
from ktrainer.runtime import hardware
from ktrainer.runtime.tensorflow_logging import environment


@dataclass(frozen=True)
class Launch:
    """One launch, as it is started once or, after failures, several times.

    Attributes:
        command: starts the ranks.
        environment: theirs.
        options: what they read at their start.
        grace: seconds in which they must end when asked to.
        heal: the keys of `world` that make them heal; empty: they do not.
        listen: the address that mpirun listens on; None: all.
        connections: to the hosts of the ranks; None: all are on this one.
        shared: a folder that all hosts share; None: it is one host.
    """

    command: list[str]
    environment: dict[str, str]
    options: Options
    grace: float
    heal: dict[str, Any]
    listen: str | None
    connections: HostConnections | None = None
    shared: str | None = None

    def without(self, lost: Mapping[int, str], args: argparse.Namespace) -> Launch:
        """The same launch on the surviving hosts, `args.ranks` with fewer ranks.

        Args:
            lost: rank -> its host.
        """
        assert self.connections is not None
        hosts = [host for host in self.connections.hosts if host.name not in lost.values()]
        args.ranks = sum(host.slots for host in hosts)
        try:
            made = prepare_launch(args, hosts)
        except ConfigError as error:
            if error.path != "world.heal":
                raise
            print(f"ktrainer run: the ranks do not heal from now on: {error}", file=sys.stderr)
            args.heal = False  # a pipeline of fewer ranks may have one replica
            made = prepare_launch(args, hosts)
        kept = {name: self.environment[name] for name in (HASH_SEED,) if name in self.environment}
        return replace(
            made,
            environment={**made.environment, **kept},  # sets iterate as before, on one rank too
            options=replace(made.options, seed=self.options.seed),
        )

    @property
    def joining(self) -> int:
        """The number of ranks that may join later."""
        return MAY_JOIN if self.heal else 0


def prepare_launch(args: argparse.Namespace, hosts: Sequence[Host]) -> Launch:
    """Check the configuration and the hosts, and derive from them how the ranks are started."""
    requested = heal_option.requested(args)
    config = _checked(args, to_environment(requested)) if args.check else None
    heal = heal_option.settings(args, config)
    several = args.ranks > 1 or bool(heal)  # others may join
    cpus = hardware.available_cpus()
    threads = _threads(args, hosts, config, len(cpus) or os.cpu_count() or 1)
    if hosts and args.network is not None:
        raise ConfigError("--network is for one host: hosts use their network, or --interface")
    network: mpirun_command.Network = "any" if hosts else args.network or "loopback"
    asked = args.threads is not None
    env = rank_environment(environment(), threads, network, config, several, asked=asked)
    env |= to_environment(heal or requested, args.grace)
    env |= heal_option.mpi_settings(heal, network == "loopback" or bool(hosts))
    more, listen = list[str](), LOOPBACK if network == "loopback" else None
    connections, shared = None, None
    if hosts:
        connected = launch_hosts.connect(args, hosts, config, threads, heal)
        more, listen = connected.mpirun_arguments, connected.address
        connections = connected.connections
        shared = str(connected.shared)
        env |= connected.mpi_settings
    slices = hardware.cpu_slices(cpus, args.ranks) if args.bind and not hosts else []
    # Threads beyond the cores of a slice were asked for, so they may use other cores too.
    fitting = slices if slices and threads <= len(slices[0]) else []
    return Launch(
        _command(args, [*heal_option.mpirun_arguments(heal), *more], bool(more)),
        env,
        _options(fitting, args, config, several),
        args.grace or (config or Config()).trainer.interrupt.grace,
        heal,
        listen,
        connections,
        shared,
    )


def _checked(args: argparse.Namespace, requested: Mapping[str, str]) -> Config | None:
    """The configuration on the command line; None: there is none."""
    with naming_the_separator(args.args):
        config = checked_config(args.script, args.args, args.ranks, args.workers, requested)
    if config is not None:
        require_trackers(config)
    return config


def _command(
    args: argparse.Namespace, more: Sequence[str] = (), several_hosts: bool = False
) -> list[str]:
    """The command that starts the ranks: mpirun, or `parameter_server_cluster`."""
    worker = [sys.executable, "-m", "ktrainer.launch.rank_process", "{folder}", args.script]
    if args.workers is not None:
        counts = [str(args.workers), str(args.servers)]
        cluster = [sys.executable, "-m", "ktrainer.launch.parameter_server_cluster", "{folder}"]
        return [*cluster, *counts, *worker]
    return mpirun_command.mpirun_command(
        args.ranks,
        worker,
        mpirun=mpirun_command.find_mpirun(),
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        more=more,
        several_hosts=several_hosts,
    )


def _threads(
    args: argparse.Namespace, hosts: Sequence[Host], config: Config | None, cores: int
) -> int:
    """Threads of each rank: those asked for, else its part of the cores of a host."""
    wanted = args.threads or (config and config.world.threads) or _threads_wanted(os.environ)
    here = max((host.slots for host in hosts), default=args.ranks)  # ranks on one host
    return mpirun_command.threads_per_rank(cores, here, wanted)


def _threads_wanted(environ: Mapping[str, str]) -> int | None:
    value = environ.get(THREADS)
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ConfigError("must be a whole number from 1", path=THREADS, value=value)
    return int(value)


def _options(
    slices: list[list[int]], args: argparse.Namespace, config: Config | None, several: bool
) -> Options:
    words, own = split_words(args.args) if args.check else ([], args.args)
    out, err = (_terminal(stream) for stream in (sys.stdout, sys.stderr))
    return Options(slices, out, err, words, own, _seed(config, several), args.ranks)


def _seed(config: Config | None, several: bool) -> int | None:
    """The seed of a plain script: the one configured; else that of the run which it resumes, so
    that it splits and shuffles its data as before; else a new one for several ranks."""
    if config is not None and config.is_set("seed") and config.seed is not None:
        return config.seed
    seed = None if config is None else _saved_seed(config)
    return secrets.randbits(31) if seed is None and several else seed


def _saved_seed(config: Config) -> int | None:
    """The seed in the newest checkpoint from which a run may resume, if there is one."""
    mode, run = config.checkpoint.resume, config.run.dir
    named = run if run is not None and "{time}" not in run else None
    path = (config.checkpoint.dir or named) if mode == "auto" else mode
    if mode == "never" or path is None:
        return None
    # Imported here: most launches have nothing to resume.
    from ktrainer.checkpoint.format.find_checkpoints import select_checkpoint

    with contextlib.suppress(CheckpointError, OSError):  # the ranks report what cannot be read
        seed = (select_checkpoint(Path(path).expanduser()).manifest or {}).get("script_seed")
        return seed if isinstance(seed, int) else None
    return None


def _terminal(stream: object) -> str | None:
    """The terminal's path, if a stream is one."""
    try:
        return os.ttyname(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
