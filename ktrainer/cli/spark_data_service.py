"""The workers of a tf.data service as tasks of a Spark job, for `spark-submit`.

    spark-submit --master "local[4]" spark_data_service.py --config FILE.json

The driver runs the dispatchers; each task, of which the master runs so many at once, is one worker.
Executors need this Python environment (PYSPARK_PYTHON) and reach the driver at --address. A worker
that fails ends the service.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktrainer.cli.data_service_command import (
    add_arguments,
    environment_of,
    listed_path,
    require_own_address,
)
from ktrainer.cli.run_command import recorded_signals
from ktrainer.config.data_service_file import TfDataServiceConfig, check_workers
from ktrainer.errors import KtrainerError, SetupError
from ktrainer.launch import orphan_prevention
from ktrainer.launch.data_service_group import DataServiceGroup, free_ports
from ktrainer.launch.rank_output import LineMerger

_POLL = 0.5


def main(argv: list[str]) -> int:
    """Serve until the Spark application ends; return the exit code."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(prog="spark_data_service.py", allow_abbrev=False)
    add_arguments(parser)
    parser.set_defaults(workers=None)
    args = parser.parse_args(argv)
    context = SparkSession.builder.appName("ktrainer data-service").getOrCreate().sparkContext
    try:
        return _serve(context, args)
    except KtrainerError as error:
        print(f"spark_data_service.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        context.stop()


def _serve(context: Any, args: argparse.Namespace) -> int:
    if args.dispatcher_side == "training":
        raise SetupError(
            "tasks of a Spark job are started once, but dispatchers of the training side come and "
            "go: leave --dispatcher-side out, or run `ktrainer data-service` on the compute hosts"
        )
    workers = args.workers or context.defaultParallelism
    if workers > context.defaultParallelism:
        raise SetupError(
            f"{workers} workers need as many tasks at once, but the master runs "
            f"{context.defaultParallelism}: give spark-submit --master 'local[{workers}]', or more "
            "executors, or -n fewer"
        )
    each = check_workers(workers, args.dispatchers)
    require_own_address(args.address)
    config = TfDataServiceConfig(
        args.dispatchers, each, token=secrets.token_hex(4), timeout=args.deadline
    )
    env, path = environment_of(args, workers), listed_path(args)
    out, err = (LineMerger(s.buffer, args.dispatchers) for s in (sys.stdout, sys.stderr))
    with recorded_signals() as signals:

        def start(found: TfDataServiceConfig) -> None:
            # What differs from this environment, which is the driver's: an executor has its own.
            changed = {key: env[key] for key in env if os.environ.get(key) != env[key]}
            plan = [(found.addresses[i // each], changed) for i in range(workers)]
            run = threading.Thread(target=_run_tasks, args=(context, plan, signals), daemon=True)
            run.start()
            threading.Thread(target=_follow_parent, args=(signals,), daemon=True).start()

        work_dir = Path(args.work_dir).resolve() if args.work_dir else None
        return DataServiceGroup(
            config, path, args.address, work_dir, env, out, err, signals, start_workers=start
        ).run()


def _run_tasks(context: Any, plan: list[tuple[str, dict[str, str]]], signals: list[int]) -> None:
    """Run one task for each worker; their end is that of the service."""
    try:
        # Barrier mode starts all of them at once, or none.
        context.parallelize(plan, len(plan)).barrier().mapPartitions(_work).collect()
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"spark_data_service.py: the Spark job ended: {text}", file=sys.stderr, flush=True)
    signals.append(signal.SIGABRT)


def _work(plan: Iterator[tuple[str, dict[str, str]]]) -> Iterator[int]:
    """One worker, in a task on any host; its end is an error."""
    import socket

    ((dispatcher, env),) = plan
    host, _, port = dispatcher.rpartition(":")
    with socket.create_connection((host, int(port)), 10.0) as reached:
        own = reached.getsockname()[0]  # this host's address towards the driver
    (number,) = free_ports(1)
    module = "ktrainer.launch.data_service_process"
    words = [sys.executable, "-m", module, "worker", str(number), own, dispatcher]
    worker = subprocess.Popen(
        words, env={**os.environ, **env}, preexec_fn=orphan_prevention.end_with_parent
    )
    raise RuntimeError(f"the worker at {own}:{number} ended with code {worker.wait()}")


def _follow_parent(signals: list[int]) -> None:
    """End with spark-submit, which may be gone without a signal to this process."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_POLL)
    signals.append(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
