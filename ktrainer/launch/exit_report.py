"""The launcher's last messages, its exit code, and whether the group is started again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ktrainer.config.redact import is_secret_name, redact_text
from ktrainer.errors import RUN_AGAIN
from ktrainer.launch.failure_report import (
    LOST,
    SIGNAL_BASE,
    Failure,
    error_message,
    first_failure,
    host_failure,
    late_failure,
    missed_failure,
    others,
)
from ktrainer.launch.group_state import GroupEnd
from ktrainer.launch.restarts import Restarts
from ktrainer.runtime.history_file import ROWS, append, end_since, read_events

TIMED_OUT = 124  # as timeout(1)
_EXIT = "builtins.SystemExit"
_SHOW_CURSOR = "\x1b[?25h"


def restarts_follow(
    end: GroupEnd,
    args: argparse.Namespace,
    restarts: Restarts,
    wait: Callable[[], int | str | None],
    heals: bool = False,
) -> bool:
    """Return whether the group is to be started again: print why, and wait for the time to do it.

    Args:
        wait: returns None at that time, or before it a signal or `"timeout"`.
    """
    failure = _failure(end, heals)
    if end.stopped_by is not None or end.interrupted is not None or failure is None:
        return False
    if len(end.lost) == args.ranks:
        return False  # no host is left
    why_not = restarts.why_not(end, failure)
    if why_not is not None:
        if why_not:
            _print(why_not)
        return False
    _print_failure(end, failure, args.ranks)
    record_end(end, "failed", failure, restarts.seconds)
    number = f"{restarts.count + 1} of {restarts.limit}"
    cold = restarts.why_cold()
    again = f"; TensorFlow is imported again, since {cold}" if cold else ""
    _print(f"starting again in {restarts.seconds:g} s, restart {number}{again}")
    if end.lost:
        _print("the surviving hosts continue")
    end.stopped_by = wait()
    end.failures, end.saved = {}, restarts.has_saved  # already printed
    return end.stopped_by is None


def conclude(end: GroupEnd, args: argparse.Namespace, heals: bool = False) -> int:
    """Print how the group ended, the first failure's traceback last; return the exit code."""
    if end.code != 0 and sys.stdout.isatty():
        print(_SHOW_CURSOR, end="", flush=True)  # an interrupted display has hidden it
    if end.stopped_by == "timeout":
        _print(f"ended after {args.timeout:g} seconds (--timeout)")
        record_end(end, "interrupted", f"ended after {args.timeout:g} seconds (--timeout)")
        return TIMED_OUT
    if end.interrupted is not None and not end.failures:
        _print(end.interrupted.text)
        return end.interrupted.code
    if isinstance(end.stopped_by, int):
        _print(f"ended by {signal.Signals(end.stopped_by).name}")
        record_end(end, "interrupted", signal.Signals(end.stopped_by).name)
        chosen = [n.code for n in end.failures.values() if n.kind == _EXIT]
        own = {r: n for r, n in end.failures.items() if not n.follows and n.kind != _EXIT}
        if (failed := first_failure(own, (), 0, "", {})) is not None:
            _print_failure(end, failed, args.ranks)
        code = RUN_AGAIN if end.saved else SIGNAL_BASE + end.stopped_by
        return chosen[0] if chosen else code
    failure = _failure(end, heals)
    if failure is None:
        return 0
    _print_failure(end, failure, args.ranks)
    record_end(end, "failed", failure)
    return failure.code or 1


def record_end(
    end: GroupEnd, reason: str, cause: Failure | str, restart: float | None = None
) -> None:
    """Write in the record of the run how its ranks have ended, of which rank 0 may know nothing.

    Args:
        reason: `failed` or `interrupted`. A fit that has finished stays so; the first failure
            says more than how rank 0 has ended because of it.
        cause: the first failure, or why the ranks were ended.
        restart: seconds until they are started again; None: they are not.
    """
    if end.history is None:
        return
    path, facts = Path(end.history), dict[str, object]()
    if isinstance(cause, Failure):
        facts = {} if cause.rank is None else {"rank": cause.rank}
        facts |= {} if restart is None else {"restart": restart}
        note = end.failures.get(cause.rank) if cause.rank is not None else None
        cause = error_message(note) if note is not None else cause.headline
    secrets = [text for name, text in os.environ.items() if is_secret_name(name)]
    with suppress(OSError):  # it may be on another host
        events = [e for e in read_events(path, only_last=ROWS) if not e.get("inside")]
        last = end_since(events)
        if last is None or (reason == "failed" and last["reason"] != "finished"):
            fit, why = events[-1].get("fit", 1) if events else 1, redact_text(cause, secrets)
            append(path, "end", fit=fit, reason=reason, why=why, **facts)


def _failure(end: GroupEnd, heals: bool) -> Failure | None:
    """The failure; None for a group that heals if a rank reached the end and none is missed."""
    if heals and end.ended and end.missed is None and not end.failures and not end.late:
        return None
    if end.late and all(note.follows for note in end.failures.values()):
        return late_failure(end.late, end.absent, end.faults)
    if end.lost and all(note.follows and note.kind != LOST for note in end.failures.values()):
        return host_failure(end.lost, end.code)
    if heals and end.missed is not None:
        return missed_failure(end.failures, end.missed, end.faults)
    if heals and not end.failures and end.code == 0:
        # With failure mitigation mpirun succeeds even if every rank is lost.
        return Failure(None, 1, "all processes have been lost")
    return first_failure(end.failures, end.silent, end.code, end.mpirun_output, end.faults)


def _print_failure(end: GroupEnd, failure: Failure, ranks: int) -> None:
    """Print one line for each failure; last, the traceback of the first."""
    for line in others(end.failures, failure):
        _print(line)
    rest = "; all others were ended" if failure.rank is not None and ranks > 1 else ""
    if failure.text:
        _print(f"{failure.headline}{rest}:")
        print(failure.text.rstrip(), file=sys.stderr, flush=True)
    else:
        _print(failure.headline + rest)


def _print(text: str) -> None:
    print(f"ktrainer run: {text}", file=sys.stderr, flush=True)
