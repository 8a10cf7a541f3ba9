"""`ktrainer run -n 2 script.py key=value ...`: run a script in one process or in several.

`ktrainer launch` is another name for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ktrainer.cli import launch_hosts
from ktrainer.cli.launch_config import checked_config, naming_the_separator, split_words
from ktrainer.cli.launch_options import THREADS, add_run_options
from ktrainer.config import Config
from ktrainer.config.launch_environment import LOOPBACK, MAY_JOIN, to_environment
from ktrainer.config.watch_checks import require_trackers
from ktrainer.errors import ConfigError
from ktrainer.launch import heal_option, mpirun_command
from ktrainer.launch.exit_report import conclude, restarts_follow
from ktrainer.launch.host_connections import HostConnections
from ktrainer.launch.hosts import Host
from ktrainer.launch.launch_folders import private_folder
from ktrainer.launch.mpirun_command import HASH_SEED, rank_environment
from ktrainer.launch.rank_channel import Options
from ktrainer.launch.rank_group import RankGroup
from ktrainer.launch.rank_output import LineMerger
from ktrainer.launch.restarts import Restarts
from ktrainer.launch.warm_process import WarmProcess, no_warm_process
from ktrainer.runtime import hardware
from ktrainer.runtime.tensorflow_logging import environment

OUTPUT_CLOSED = 141  # a shell's exit code for a program that writes to a closed pipe
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer run`."""
    parser.description = (
        "Run a Keras script, unmodified or with a Trainer of its own, in one process or several, "
        "on this host or on --hosts, and end them all when one fails. Overrides key=value and "
        "--config FILE are ktrainer's, and checked before anything is started; all other words, "
        "and whatever comes after --, are the script's."
    )
    add_run_options(parser)


@dataclass(frozen=True)
class _Launch:
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

    def without(self, lost: Mapping[int, str], args: argparse.Namespace) -> _Launch:
        """The same launch on the surviving hosts, `args.ranks` with fewer ranks.

        Args:
            lost: rank -> its host.
        """
        assert self.connections is not None
        hosts = [host for host in self.connections.hosts if host.name not in lost.values()]
        args.ranks = sum(host.slots for host in hosts)
        try:
            made = _prepare(args, hosts)
        except ConfigError as error:
            if error.path != "world.heal":
                raise
            print(f"ktrainer run: the ranks do not heal from now on: {error}", file=sys.stderr)
            args.heal = False  # a pipeline of fewer ranks may have one replica
            made = _prepare(args, hosts)
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


def run(args: argparse.Namespace) -> int:
    """Run the script in all ranks.

    Returns:
        The exit code:

        - 0 when all ranks succeeded;
        - the code of the rank that failed first; 128 plus the number of a signal that ended it;
        - 124 after `--timeout`;
        - 75 if a signal to this process or to a rank, or lost ranks of a pipeline that heals, ended
          the run, and a checkpoint exists to resume from;
        - else, after Ctrl-C or SIGTERM, the code that a rank exited with, or 130 or 143.

    Raises:
        ConfigError: the script's configuration cannot work, or there is no such script.
        SetupError: there is no mpirun.
    """
    if not Path(args.script).is_file():
        raise ConfigError(
            f"there is no script {args.script!r}; give the path from the current folder"
        )
    hosts = launch_hosts.requested_hosts(args)
    _count_ranks(args)
    launch = _prepare(args, hosts)
    output = _mergers(args, launch)
    until = time.monotonic() + args.timeout if args.timeout else None
    with (
        private_folder(launch.shared) as records,
        recorded_signals() as signals,
        _warm_process(args, launch, Path(records)) as warm,
    ):
        restarts = Restarts(args.max_restarts or 0, args.backoff, Path(records), warm)
        while True:
            group = _rank_group(args, launch, output, signals, until, warm)
            env = {**launch.environment, **restarts.environment}
            try:
                command = restarts.command(launch.command)
                end = group.run(command, env, launch.options, listen=launch.listen)
            except BrokenPipeError:
                _discard_output()
                return OUTPUT_CLOSED
            wait = partial(restarts.wait, signals, until)
            if not restarts_follow(end, args, restarts, wait, bool(launch.heal)):
                return conclude(end, args, bool(launch.heal))
            if end.lost:
                launch = launch.without(end.lost, args)


def _rank_group(
    args: argparse.Namespace,
    launch: _Launch,
    output: tuple[LineMerger, LineMerger],
    signals: list[int],
    until: float | None,
    warm: WarmProcess | str | None,
) -> RankGroup:
    """The ranks of one start.

    Args:
        until: the moment at which they are ended; None: there is none.
        warm: see `_warm_process`.
    """
    return RankGroup(
        args.ranks,
        *output,
        grace=launch.grace,
        fixed=args.grace is not None,
        signals=signals,
        timeout=None if until is None else max(0.0, until - time.monotonic()),
        joining=launch.joining,
        warm=warm if isinstance(warm, WarmProcess) else None,
        hosts=launch.connections,
    )


@contextlib.contextmanager
def _warm_process(
    args: argparse.Namespace, launch: _Launch, folder: Path
) -> Iterator[WarmProcess | str | None]:
    """A process of which restarted ranks are forks, or why there is none; None: none is wanted."""
    if not args.max_restarts or not args.warm:
        yield None
    elif why := no_warm_process(args):
        yield why
    else:
        with contextlib.closing(WarmProcess(folder, launch.environment)) as warm:
            yield warm


def _prepare(args: argparse.Namespace, hosts: Sequence[Host]) -> _Launch:
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
    env = rank_environment(environment(), threads, network, config, several)
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
    return _Launch(
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
        config = checked_config(args.args, args.ranks, args.workers, requested)
    if config is not None:
        require_trackers(config)
    return config


@contextlib.contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """A list to which signals to this process are added, instead of their default action."""
    found: list[int] = []

    def record(number: int, _frame: FrameType | None) -> None:
        found.append(number)

    before = {number: signal.signal(number, record) for number in _SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count_ranks(args: argparse.Namespace) -> None:
    """Set `args.ranks`, from `-n` or from `--workers` and `--servers`.

    Raises:
        ConfigError: both were given.
    """
    cluster = args.workers is not None or args.servers is not None
    if cluster and args.ranks is not None:
        raise ConfigError(
            "-n counts equal processes, --workers and --servers those of a cluster with parameter "
            "servers: give one or the other"
        )
    if cluster:
        args.workers, args.servers = args.workers or 1, args.servers or 1
        args.ranks = 1 + args.workers + args.servers  # one coordinates
    args.ranks = args.ranks or 1


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
    seed = config.seed if config is not None and config.is_set("seed") else None
    if seed is None and several:
        seed = secrets.randbits(31)
    return Options(slices, out, err, words, own, seed, args.ranks)


def _terminal(stream: object) -> str | None:
    """The terminal's path, if a stream is one."""
    try:
        return os.ttyname(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None


def _mergers(args: argparse.Namespace, launch: _Launch) -> tuple[LineMerger, LineMerger]:
    prefix = args.ranks > 1 if args.prefix is None else args.prefix
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = (
        LineMerger(
            stream.buffer,
            args.ranks + launch.joining,
            prefix=prefix,
            only=0 if stream is sys.stdout and not args.all_ranks else None,
            beside_display=terminal is not None,
            drop=heal_option.NOISE if launch.heal else (),
        )
        for stream, terminal in (
            (sys.stdout, launch.options.terminal_out),
            (sys.stderr, launch.options.terminal_err),
        )
    )
    return out, err


def _discard_output() -> None:
    """Keep the interpreter from reporting a closed pipe at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.dup2(nowhere, number)
