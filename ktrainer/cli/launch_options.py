"""Command-line options of `ktrainer run`, and of the commands that run scripts as it does."""

from __future__ import annotations

import argparse
import math

from ktrainer.launch import heal_option

THREADS = "KTRAINER_THREADS"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare all options of `ktrainer run`, and the script."""
    add_size_options(parser)
    _add_host_options(parser)
    _add_output_options(parser)
    _add_process_options(parser)
    _add_restart_options(parser)
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check key=value and --config before the start; --no-check passes all words to the "
        "script, which may give them another meaning",
    )
    heal_option.add_healing_arguments(parser, positive(int))
    add_script(parser)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Declare how many processes and threads there are, and how long they may run."""
    parser.add_argument("-n", "--ranks", type=positive(int), help="processes (default: 1)")
    parser.add_argument(
        "--workers",
        type=positive(int),
        help="instead of -n, for strategy=parameter_server: processes that compute",
    )
    parser.add_argument(
        "--servers", type=positive(int), help="with --workers: processes that hold the weights"
    )
    parser.add_argument(
        "--threads",
        type=positive(int),
        help=f"threads of each process (default: world.threads, else {THREADS}, else the cores "
        "divided by the processes)",
    )
    parser.add_argument("--timeout", type=positive(float), metavar="S", help="end after S seconds")


def process_count(args: argparse.Namespace) -> int:
    """The processes that the options of `add_size_options` start; a cluster has a coordinator."""
    if args.workers is None and args.servers is None:
        return int(args.ranks or 1)
    return 1 + int(args.workers or 1) + int(args.servers or 1)


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        metavar="A:N,B:N",
        help="run N processes on host A, N on B; -n is then their sum, or less",
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="instead of --hosts: a file with `A slots=N` in each line",
    )
    parser.add_argument(
        "--rsh",
        metavar="AGENT",
        help="program that runs a command on a host: AGENT HOST COMMAND (default: ssh)",
    )
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="interface that the hosts use for one another, as eth0, or its network, as "
        "10.1.2.0/24 (default: that of the hosts' names)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
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


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give each process its own cores, when there are enough",
    )
    parser.add_argument(
        "--grace",
        type=positive(float),
        metavar="S",
        help="seconds in which processes must end when asked to (default: trainer.interrupt.grace, "
        "in the script too, which is 30)",
    )
    parser.add_argument(
        "--network",
        choices=["loopback", "any"],
        help="where processes may listen for one another (default: loopback, on no other port; "
        "hosts of --hosts use their network)",
    )


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-restarts",
        type=positive(int),
        metavar="N",
        help="after a failure restart all processes, from the last checkpoint, at most N times "
        "(default: never). Scripts find the number in KTRAINER_RESTART",
    )
    parser.add_argument(
        "--backoff",
        type=positive(float),
        metavar="S",
        default=0.25,
        help="seconds before the first restart; twice as long before each further one, up to "
        "60 (default: 0.25)",
    )
    parser.add_argument(
        "--warm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --max-restarts: keep a process that has imported TensorFlow, of which restarted "
        "processes are forks (default: yes; it takes the memory of one more process)",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Declare the script and its arguments, and show both in the usage."""
    parser.usage = (
        f"{parser.prog} [options] SCRIPT [key=value ...] [--config FILE] [-- ARGUMENTS ...]"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument(
        "args",
        nargs=argparse.REMAINDER,
        default=[],
        help="key=value, --config FILE, the script's own words",
    )


def positive(kind: type) -> type:
    """An argparse type: a finite number above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError(text)
        return float(value) if kind is float else value

    parse.__name__ = f"{kind.__name__} above 0"
    return parse  # type: ignore[return-value]
