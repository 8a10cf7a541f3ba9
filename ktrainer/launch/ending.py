"""What the launcher says at the end of a group, its exit code, and whether there is a next one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from ktrainer.errors import RUN_AGAIN
from ktrainer.launch.end import End
from ktrainer.launch.report import (
    SIGNAL_BASE,
    Failure,
    first_failure,
    late_failure,
    missed_failure,
    others,
)
from ktrainer.launch.restarts import Restarts

TIMED_OUT = 124  # as timeout(1)
_EXIT = "builtins.SystemExit"
_SHOW_CURSOR = "\x1b[?25h"


def goes_on(
    end: End,
    args: argparse.Namespace,
    restarts: Restarts,
    wait: Callable[[], int | str | None],
    heals: bool = False,
) -> bool:
    """Whether the group is to be started again; says why, and waits until it is time.

    Args:
        wait: returns when it is time, or what comes before that: a signal, or `"timeout"`.
    """
    failure = _failure(end, heals)
    if end.stopped_by is not None or end.interrupted is not None or failure is None:
        return False
    why_not = restarts.why_not(end, failure)
    if why_not is not None:
        if why_not:
            _say(why_not)
        return False
    _tell(end, failure, args.ranks)
    number = f"{restarts.count + 1} of {restarts.limit}"
    _say(f"starting again in {restarts.seconds:g} s, restart {number}")
    end.stopped_by = wait()
    end.failures, end.saved = {}, restarts.has_saved  # they are told already
    return end.stopped_by is None


def conclude(end: End, args: argparse.Namespace, heals: bool = False) -> int:
    """Say what is to be said, the first failure's traceback last; returns the exit code."""
    if end.code != 0 and sys.stdout.isatty():
        print(_SHOW_CURSOR, end="", flush=True)  # a display that was cut short had hidden it
    if end.stopped_by == "timeout":
        _say(f"ended after {args.timeout:g} seconds (--timeout)")
        return TIMED_OUT
    if end.interrupted is not None and not end.failures:
        _say(end.interrupted.text)
        return end.interrupted.code
    if isinstance(end.stopped_by, int):
        _say(f"ended by {signal.Signals(end.stopped_by).name}")
        chosen = [n.code for n in end.failures.values() if n.kind == _EXIT]
        own = {r: n for r, n in end.failures.items() if not n.follows and n.kind != _EXIT}
        if (failed := first_failure(own, (), 0, "", {})) is not None:
            _tell(end, failed, args.ranks)
        code = RUN_AGAIN if end.saved else SIGNAL_BASE + end.stopped_by
        return chosen[0] if chosen else code
    failure = _failure(end, heals)
    if failure is None:
        return 0
    _tell(end, failure, args.ranks)
    return failure.code or 1


def _failure(end: End, heals: bool) -> Failure | None:
    """What went wrong; where ranks may die, nothing if one came to the end and nobody is missed."""
    if end.late and all(note.follows for note in end.failures.values()):
        return late_failure(end.late, end.absent, end.faults)
    if heals and end.missed is not None:
        return missed_failure(end.failures, end.missed, end.faults)
    if heals and end.ended and not end.failures:
        return None
    if heals and not end.failures and end.code == 0:
        # With failure mitigation mpirun ends well whoever dies, even if that is everybody.
        return Failure(None, 1, "all processes have died")
    return first_failure(end.failures, end.gone, end.code, end.said, end.faults)


def _tell(end: End, failure: Failure, ranks: int) -> None:
    """What happened to whom; last, what the first one that failed had to say."""
    for line in others(end.failures, failure):
        _say(line)
    rest = "; all others were ended" if failure.rank is not None and ranks > 1 else ""
    if failure.text:
        _say(f"{failure.headline}{rest}:")
        print(failure.text.rstrip(), file=sys.stderr, flush=True)
    else:
        _say(failure.headline + rest)


def _say(text: str) -> None:
    print(f"ktrainer run: {text}", file=sys.stderr, flush=True)
