"""`ktrainer run -n 2 script.py key=value ...`: run a script in one process or in several.

`ktrainer launch` is another name for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ktrainer.config import Config, load_config, parse_known_cli
from ktrainer.config.backends import BACKENDS
from ktrainer.config.launched import SPARE, as_launched, to_environment
from ktrainer.errors import ConfigError
from ktrainer.facts import WorldFacts
from ktrainer.launch import command, healing
from ktrainer.launch.channel import Options
from ktrainer.launch.ending import conclude, goes_on
from ktrainer.launch.folders import private_folder
from ktrainer.launch.output import LineMerger
from ktrainer.launch.restarts import Restarts
from ktrainer.launch.signals import noted
from ktrainer.launch.watch import Group
from ktrainer.plan import make_plan
from ktrainer.quiet import environment

READER_GONE = 141  # what a shell says of a program whose reader has closed the pipe
_THREADS = "KTRAINER_THREADS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer run`."""
    parser.usage = (
        f"{parser.prog} [options] SCRIPT [key=value ...] [--config FILE] [-- ARGUMENTS ...]"
    )
    parser.description = (
        "Run a Keras script, unmodified or with a Trainer of its own, in one process or in several "
        "on this host, and end them all when one fails. Overrides key=value and --config FILE are "
        "ktrainer's, and checked before anything is started; all other words, and whatever comes "
        "after --, are the script's."
    )
    parser.add_argument("-n", "--ranks", type=positive(int), help="processes (default: 1)")
    parser.add_argument(
        "--workers",
        type=positive(int),
        help="instead of -n, for strategy=parameter_server: processes that compute",
    )
    parser.add_argument(
        "--servers", type=positive(int), help="with --workers: processes that keep the weights"
    )
    parser.add_argument(
        "--threads",
        type=positive(int),
        help=f"threads of each process (default: world.threads, else {_THREADS}, else the cores "
        "divided by the processes)",
    )
    parser.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put [rank] before each line (default: with more than one process)",
    )
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="show the standard output of all ranks (default: of rank 0, and of a rank that fails)",
    )
    parser.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give each process cores of its own, when there are enough",
    )
    parser.add_argument("--timeout", type=positive(float), metavar="S", help="end after S seconds")
    parser.add_argument(
        "--grace",
        type=positive(float),
        metavar="S",
        help="seconds that processes have to end in once asked to (default: "
        "trainer.interrupt.grace, in the script too, which is 30)",
    )
    parser.add_argument(
        "--max-restarts",
        type=positive(int),
        metavar="N",
        help="after a failure start all processes again, from the last checkpoint, at most N times "
        "(default: never). Scripts find the number in KTRAINER_RESTART",
    )
    parser.add_argument(
        "--backoff",
        type=positive(float),
        metavar="S",
        default=1.0,
        help="seconds before the first restart; twice as long before each further one, up to "
        "60 (default: 1)",
    )
    parser.add_argument(
        "--network",
        choices=["loopback", "any"],
        default="loopback",
        help="where processes may listen for one another (default: loopback, on no other port)",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check key=value and --config before the start; --no-check hands all words to the "
        "script, which may give them another meaning",
    )
    healing.add_healing_arguments(parser, positive(int))
    parser.add_argument("script", help="a Python file")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, help="key=value, --config FILE, the script's own words"
    )


def run(args: argparse.Namespace) -> int:
    """Run the group; returns the exit code.

    0 when all ranks ended well; the code of the rank that failed first, 128 plus the number of the
    signal that ended it; 124 after `--timeout`; 75 where the ranks were asked to end, by a signal
    to this process or to one of them, or ended because others of a pipeline that heals had died,
    and a checkpoint is there to go on from; else, after Ctrl-C or SIGTERM, the code that a rank
    chose to exit with, or 130 or 143.

    Raises:
        ConfigError: the script's configuration cannot work, or there is no such script.
        SetupError: there is no mpirun.
    """
    if not Path(args.script).is_file():
        raise ConfigError(
            f"there is no script {args.script!r}; give the path from the current folder"
        )
    _count(args)
    told = to_environment(healing.asked(args))
    config = None
    if args.check:
        with _naming_the_separator(args.args):
            config = checked_config(args.args, args.ranks, args.workers, told)
    heal = healing.settings(args, config)
    several = args.ranks > 1 or bool(heal)  # others may join
    line = _command(args, healing.mpirun_arguments(heal))
    cpus = command.available_cpus()
    asked = args.threads or (config and config.world.threads) or _threads_asked(os.environ)
    threads = command.threads_per_rank(len(cpus) or os.cpu_count() or 1, args.ranks, asked)
    env = rank_environment(environment(), threads, args.network, config, several)
    env |= to_environment(heal, args.grace) | healing.mpi_settings(heal, args.network == "loopback")
    slices = command.cpu_slices(cpus, args.ranks) if args.bind else []
    # Threads beyond the cores of a slice were asked for, so they are meant to run elsewhere too.
    fitting = slices if slices and threads <= len(slices[0]) else []
    options = _options(fitting, args, config, several)
    spare = SPARE if heal else 0
    out, err = _mergers(args, options, spare)
    grace = args.grace or (config or Config()).trainer.interrupt.grace
    until = time.monotonic() + args.timeout if args.timeout else None
    with private_folder() as memory, noted() as signals:
        restarts = Restarts(args.max_restarts or 0, args.backoff, Path(memory))
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            group = Group(
                args.ranks,
                out,
                err,
                grace=grace,
                fixed=args.grace is not None,
                signals=signals,
                timeout=left,
                spare=spare,
            )
            given = {**env, **restarts.environment}
            try:
                end = group.run(line, given, options, loopback=args.network == "loopback")
            except BrokenPipeError:
                _ignore_output()
                return READER_GONE
            wait = partial(restarts.wait, signals, until)
            if not goes_on(end, args, restarts, wait, bool(heal)):
                return conclude(end, args, bool(heal))


def _count(args: argparse.Namespace) -> None:
    """Hold `-n`, or `--workers` and `--servers`, against one another; sets `args.ranks`.

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


def _command(args: argparse.Namespace, more: Sequence[str] = ()) -> list[str]:
    """What starts the ranks: mpirun, or our own starter of a cluster."""
    worker = [sys.executable, "-m", "ktrainer.launch.worker", "{folder}", args.script]
    if args.workers is not None:
        counts = [str(args.workers), str(args.servers)]
        return [sys.executable, "-m", "ktrainer.launch.cluster", "{folder}", *counts, *worker]
    return command.mpirun_command(
        args.ranks,
        worker,
        mpirun=command.find_mpirun(),
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        more=more,
    )


def rank_environment(
    given: Mapping[str, str],
    threads: int,
    network: command.Network,
    config: Config | None,
    several: bool = False,
) -> dict[str, str]:
    """The environment of the ranks: `given`, then MPI's and the libraries' where it is silent."""
    defaults = {
        **command.mpi_environment(network),
        **command.thread_environment(threads, given),
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": _python_path(given),
    }
    if several:
        defaults["PYTHONHASHSEED"] = "0"  # sets of strings iterate alike on all ranks
    # Zero, not nothing: `import ktrainer` comes before a rank knows its configuration.
    loud = config is not None and config.logging.tensorflow
    defaults["TF_CPP_MIN_LOG_LEVEL"] = "0" if loud else "3"
    return {**defaults, **given, "PYTHONPATH": defaults["PYTHONPATH"]}


def _python_path(given: Mapping[str, str]) -> str:
    """PYTHONPATH with the folder that this very package is in, wherever the user stands."""
    own = str(Path(__file__).resolve().parents[2])
    path = [p for p in given.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(path if own in path else [*path, own])


def checked_config(
    words: Sequence[str], ranks: int, workers: int | None, told: Mapping[str, str]
) -> Config | None:
    """The configuration that `words` make, checked with what ranks are `told` besides; None when
    they say nothing of one."""
    path, overrides, _ = parse_known_cli(words)
    if path is None and not overrides:
        return None
    # Without a word on the backend, the script may well choose one in its code; keys of the
    # backend are then for the script to check.
    named = any(word.partition("=")[0] in ("backend", "backend.name") for word in overrides)
    if path is None and not named:
        overrides = [word for word in overrides if not _of_some_backend(word)]
    # The script that registers its callbacks does not run here.
    config = load_config(path, overrides, on_unknown_callback=lambda _error: None)
    if named or config.backend.name != "local":
        cores = len(command.available_cpus()) or os.cpu_count() or 1
        size = ranks if workers is None else 1
        horovod = find_spec("horovod") is not None
        facts = WorldFacts(size, size, cores, horovod=horovod, workers=workers)
        make_plan(as_launched(config, told), facts)
        _check_cluster(config, workers)
    return config


@contextlib.contextmanager
def _naming_the_separator(words: Sequence[str]) -> Iterator[None]:
    """A key that is not known may be a word of the script's."""
    try:
        yield
    except ConfigError as error:
        if "unknown key" in str(error) and "--" not in words:
            error.args = (f"{error} Arguments of the script's own that hold a = go after --.",)
        raise


def _check_cluster(config: Config, workers: int | None) -> None:
    """`--workers` makes a cluster that only one strategy has a use for."""
    strategy = getattr(config.backend, "strategy", None)
    if workers is not None and strategy != "parameter_server":
        raise ConfigError(
            "--workers and --servers are for backend.strategy=parameter_server; give -n instead",
            path="backend.strategy" if strategy else "backend",
            value=strategy or config.backend.name,
        )


def _of_some_backend(word: str) -> bool:
    """Whether `word` sets a key that one of the backends has."""
    group, _, key = word.partition("=")[0].partition(".")
    known = {field.name for backend in BACKENDS.values() for field in fields(backend)}
    return group == "backend" and key.partition(".")[0] in known


def _threads_asked(environ: Mapping[str, str]) -> int | None:
    value = environ.get(_THREADS)
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ConfigError("must be a whole number from 1", path=_THREADS, value=value)
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


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that belong to ktrainer, and those of the script."""
    path, overrides, own = parse_known_cli(words)
    return [*overrides, *([] if path is None else [f"--config={path}"])], own


def _terminal(stream: object) -> str | None:
    """Path of the terminal that a stream is, if it has one."""
    try:
        return os.ttyname(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None


def _mergers(
    args: argparse.Namespace, options: Options, spare: int = 0
) -> tuple[LineMerger, LineMerger]:
    prefix = args.ranks > 1 if args.prefix is None else args.prefix
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = (
        LineMerger(
            stream.buffer,
            args.ranks + spare,
            prefix=prefix,
            only=0 if stream is sys.stdout and not args.all_ranks else None,
            beside_display=terminal is not None,
            drop=healing.NOISE if spare else (),
        )
        for stream, terminal in (
            (sys.stdout, options.terminal_out),
            (sys.stderr, options.terminal_err),
        )
    )
    return out, err


def _ignore_output() -> None:
    """Keep the interpreter from complaining at exit that nobody reads."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.dup2(nowhere, number)


def positive(kind: type) -> type:
    """An argparse type: a number above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise ValueError(text)
        return float(value) if kind is float else value

    parse.__name__ = f"{kind.__name__} above 0"
    return parse  # type: ignore[return-value]
