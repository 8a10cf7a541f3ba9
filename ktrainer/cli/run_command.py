"""`ktrainer run -n 2 script.py key=value ...`: run a script in one process or in several.

`ktrainer launch` is another name for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from ktrainer.cli import launch_hosts
from ktrainer.cli.launch_options import add_run_options, process_count
from ktrainer.cli.prepare_launch import Launch, prepare_launch
from ktrainer.errors import ConfigError
from ktrainer.launch import heal_option
from ktrainer.launch.exit_report import conclude, restarts_follow
from ktrainer.launch.launch_folders import private_folder
from ktrainer.launch.rank_group import RankGroup
from ktrainer.launch.rank_output import LineMerger
from ktrainer.launch.restarts import Restarts
from ktrainer.launch.warm_process import WarmProcess, no_warm_process

OUTPUT_CLOSED = 141  # a shell's exit code for a program that writes to a closed pipe
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer run`."""
    parser.description = (
        "Run a Keras script, unmodified or with a Trainer of its own, in one process or several, "
        "on this host or on --hosts, and end them all when one fails. Options stand before the "
        "script. After it, overrides key=value and --config FILE are ktrainer's, and checked "
        "before anything is started; all other words, and whatever comes after --, are the "
        "script's."
    )
    add_run_options(parser)


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
    launch = prepare_launch(args, hosts)
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
    launch: Launch,
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
    args: argparse.Namespace, launch: Launch, folder: Path
) -> Iterator[WarmProcess | str | None]:
    """A process of which restarted ranks are forks, or why there is none; None: none is wanted."""
    if not args.max_restarts or not args.warm:
        yield None
    elif why := no_warm_process(args):
        yield why
    else:
        with contextlib.closing(WarmProcess(folder, launch.environment)) as warm:
            yield warm


@contextlib.contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """A list to which signals to this process are added, instead of their default action.

    SIGHUP stays ignored where it is, as under nohup.
    """
    found: list[int] = []

    def record(number: int, _frame: FrameType | None) -> None:
        found.append(number)

    # SIGINT is not kept: a shell without jobs ignores it in all that it starts with `&`.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    taken = [number for number in _SIGNALS if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, record) for number in taken}
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
    args.ranks = process_count(args)


def _mergers(args: argparse.Namespace, launch: Launch) -> tuple[LineMerger, LineMerger]:
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
