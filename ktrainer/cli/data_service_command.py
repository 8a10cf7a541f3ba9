"""`ktrainer data-service -n 4 --config FILE.json`: compute input pipelines for training jobs."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from pathlib import Path

from ktrainer.cli.launch_options import positive
from ktrainer.cli.run_command import recorded_signals
from ktrainer.config.data_service_file import (
    TfDataServiceConfig,
    check_workers,
    dispatcher_file,
    is_reachable,
)
from ktrainer.errors import ConfigError, SetupError
from ktrainer.launch.data_service_group import DataServiceGroup
from ktrainer.launch.mpirun_command import rank_environment
from ktrainer.launch.rank_output import LineMerger
from ktrainer.runtime.tensorflow_logging import environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer data-service`."""
    parser.description = (
        "Run a tf.data service on this host: workers that compute input pipelines, and the "
        "dispatchers that hand out their work. Training jobs find it by the file that it writes "
        "when it is ready and removes when it ends: data.service.config=FILE.json. Its servers "
        "listen at --address, without encryption or passwords: close their ports to other hosts."
    )
    parser.add_argument(
        "-n", "--workers", type=positive(int), default=1, help="worker processes (default: 1)"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--dispatchers",
        type=positive(int),
        default=1,
        help="1 for all training processes, or as many as there are of them (default: 1)",
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=["compute", "training"],
        default="compute",
        help="where dispatchers run: here, or in the training processes (default: compute)",
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="this host, as training processes and workers reach it (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--work-dir",
        metavar="DIR",
        help="folder where dispatchers keep a journal: one that fails is started again, and "
        "its readers continue (default: none, and the service ends)",
    )
    parser.add_argument(
        "--threads", type=positive(int), help="threads of each process (default: cores / workers)"
    )
    parser.add_argument(
        "--deadline",
        type=positive(float),
        metavar="S",
        default=120.0,
        help="seconds in which all processes must listen (default: 120)",
    )
    parser.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put [number] before each line: dispatchers first, then workers",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C, else the code of the process that failed first.

    Raises:
        ConfigError: numbers that do not fit together, an address of another host, or no folder for
            the file.
        SetupError: a process did not start.
    """
    each = check_workers(args.workers, args.dispatchers)
    require_own_address(args.address)
    path = listed_path(args)
    work_dir = _work_dir(args)
    config = TfDataServiceConfig(
        args.dispatchers,
        each,
        args.dispatcher_side,
        token=secrets.token_hex(4),
        timeout=args.deadline,
    )
    count = args.workers + (args.dispatchers if args.dispatcher_side == "compute" else 0)
    out, err = (
        LineMerger(stream.buffer, count, prefix=args.prefix) for stream in (sys.stdout, sys.stderr)
    )
    with recorded_signals() as signals:
        return DataServiceGroup(
            config,
            path,
            args.address,
            work_dir,
            environment_of(args, args.workers),
            out,
            err,
            signals,
        ).run()


def _work_dir(args: argparse.Namespace) -> Path | None:
    """The folder of the dispatchers' records, made if it is missing; None: a temporary one."""
    if not args.work_dir:
        return None
    if args.dispatcher_side == "training":
        raise ConfigError("--work-dir is for dispatchers that run here: leave it out")
    folder = Path(args.work_dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--work-dir: the folder {folder} cannot be made ({error.strerror}): give one in a "
            "folder that you may write to"
        ) from error
    return folder


def require_own_address(address: str) -> None:
    """Refuse an address on which nothing here can listen: servers would listen on all."""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"--address: nothing can listen at {address!r} here ({error.strerror}): give an "
            "address of this host, as `ip address` lists them, or its name"
        ) from error


def listed_path(args: argparse.Namespace) -> Path:
    """The file to write, without those of a service that was killed.

    Raises:
        ConfigError: there is no folder for it, or it is the file of something else, or of a
            service that runs.
    """
    path = Path(args.config).resolve()
    if not path.parent.is_dir():
        raise ConfigError(f"--config: there is no folder {path.parent}; make it, or give another")
    if path.exists():
        _require_stale(path)
    for stale in (path, *(dispatcher_file(path, rank) for rank in range(args.dispatchers))):
        stale.unlink(missing_ok=True)
    return path


def _require_stale(path: Path) -> None:
    try:
        found = TfDataServiceConfig.read(path)
    except SetupError as error:
        raise ConfigError(
            f"--config: {path} exists and is not the file of a tf.data service, so it is not "
            "overwritten. --config names the file that this command writes: give another"
        ) from error
    if any(map(is_reachable, found.addresses)):
        raise ConfigError(
            f"--config: {path} is the file of a tf.data service that runs, at "
            f"{', '.join(found.addresses)}: end that one first, or give another file"
        )


def environment_of(args: argparse.Namespace, workers: int) -> dict[str, str]:
    """The environment of dispatchers and workers."""
    threads = args.threads or max(1, (os.cpu_count() or 1) // workers)
    asked = args.threads is not None
    return rank_environment(environment(), threads, "loopback", None, asked=asked)
