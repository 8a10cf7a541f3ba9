"""`ktrainer watch`: show a run in a terminal while it trains, from another shell or host."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ktrainer.errors import ConfigError
from ktrainer.runs.live_record import LiveRecord

CODES = {"finished": 0, "failed": 1, "interrupted": 3, "running": 0}
END_SECONDS = 10.0  # a run that is not finished may be healed, or write down why it has ended
RESTART_SECONDS = 300.0  # that ranks may take to start again
_NEXT_FIT_SECONDS = 2.0  # between two calls of `fit` a script holds no lock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer watch`."""
    parser.description = (
        "Show a run while it trains: state, progress, metrics now and best, steps a second, time "
        "left, what happened last. Reads the run's folder alone, from any host that sees it. Ends "
        "with the run: status 0 if it has finished, 1 if it has failed, 3 if it was interrupted; "
        "130 after Ctrl-C, which ends the watching, not the run."
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the present state and end, as it does where the output is no terminal; status "
        "0 also for a run that still trains",
    )
    parser.add_argument(
        "--every",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="look at the folder so often (default: 1)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends; the exit status is that of its end."""
    from rich.console import Console

    from ktrainer.runs.live_view import live_view

    record, console = LiveRecord(Path(args.run)), Console()
    try:
        if not args.once and sys.stdout.isatty():
            _follow(record, console, args.every)
        console.print(live_view(record, console.width), soft_wrap=not console.is_terminal)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        reason = error.strerror or error
        raise ConfigError(f"{record.folder} can no longer be read: {reason}.") from None
    return CODES.get(record.state[0], 1)


def _follow(record: LiveRecord, console: Any, every: float) -> None:
    """Show the run until it has ended."""
    from rich.live import Live

    from ktrainer.runs.live_view import live_view

    still: float | None = None  # since when it does not run
    silent = max(0.0, time.time() - record.last_sign)  # it may have ended long ago
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            now = time.monotonic()
            still = None if record.state[0] == "running" else (still or now - silent)
            silent = 0.0
            waiting = None if still is None else still + _patience(record) - now
            if waiting is not None and waiting <= 0:
                return
            live.update(live_view(record, console.width, _note(record, waiting)), refresh=True)
            time.sleep(every if waiting is None else min(every, max(waiting, 0.05)))
            with suppress(OSError):  # a network file system may come back
                record.update()


def _patience(record: LiveRecord) -> float:
    """Seconds after which a run that does not run has ended."""
    if record.state[0] == "finished":
        return _NEXT_FIT_SECONDS
    restart = record.restart_seconds
    return END_SECONDS if restart is None else restart + RESTART_SECONDS


def _note(record: LiveRecord, waiting: float | None) -> str:
    if waiting is None or record.state[0] == "finished":
        return ""
    if record.restart_seconds is not None:
        return "the launcher starts the run again"
    return f"the run does not train; watching ends in {waiting:.0f} s unless it continues"
