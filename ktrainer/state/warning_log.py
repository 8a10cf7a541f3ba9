"""Warnings of a run: Python's, and log records of level WARNING and above.

They are noted on their way to the screen, which shows them as before. Python's that a script
catches or filters are not noted, nor is what C++ libraries print; log records are noted when they
are made, whatever filters and levels of handlers do with them.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MOST = 100  # different ones that are kept
LONGEST = 500  # characters of a text that is recorded
_LONGEST_KEPT = 10_000  # of one that is kept: secrets are redacted in it before it is cut
_CAPTURED = "py.warnings"  # the logger of `logging.captureWarnings`


@dataclass(frozen=True)
class NotedWarning:
    """One warning.

    Attributes:
        step: updates done when it came first.
        kind: the class of the warning, or the name of the logger.
        message: its text.
        where: file and line that it is about, or from which it was logged.
        ranks: that had it; empty: this one.
    """

    step: int
    kind: str
    message: str
    where: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """By which two are the same."""
        return self.kind, self.message


class WarningLog:
    """The warnings of one `fit`, each once, at most `MOST`.

    Any thread may note one, also in a signal handler or a finalizer: there is no lock.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._new: deque[NotedWarning] = deque()

    @property
    def has_new(self) -> bool:
        """Whether there are some that `take` has not returned."""
        return bool(self._new)

    def note(self, step: int, kind: str, text: object, where: str = "") -> None:
        """Keep a warning of this rank, unless it is known."""
        self._keep(NotedWarning(step, kind, str(text)[:_LONGEST_KEPT], where))

    def add_from_ranks(self, every: Sequence[Sequence[NotedWarning]]) -> None:
        """Add those of other ranks, which have left out what is known, and what is too much.

        Args:
            every: what each rank has taken.
        """
        found: dict[tuple[str, str], NotedWarning] = {}
        for rank, noted in enumerate(every):
            for each in noted:
                before = found.get(each.key, each)
                ranks = (*before.ranks, rank)
                found[each.key] = replace(before, step=min(before.step, each.step), ranks=ranks)
        self._new.extend(found.values())

    def take(self) -> list[NotedWarning]:
        """Those since this was last called."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._new.popleft())
        return taken

    @contextmanager
    def taking(self) -> Iterator[list[NotedWarning]]:
        """`take`, undone if the block fails: the next one then returns these first."""
        taken = self.take()
        try:
            yield taken
        except BaseException:
            self._new.extendleft(reversed(taken))
            raise

    def _keep(self, noted: NotedWarning) -> None:
        known = self._known
        if noted.key in known:
            return
        if len(known) >= MOST:
            if len(known) > MOST:
                return
            text = f"more than {MOST} different warnings: later ones are not recorded"
            noted = replace(noted, kind="ktrainer", message=text, where="")
        known.add(noted.key)
        self._new.append(noted)


def on_one_line(text: str) -> str:
    """A warning's text as it is recorded: on one line, cut where it is long."""
    line = " ".join(text.split())
    return f"{line[:LONGEST]} ..." if len(line) > LONGEST else line


# -- where warnings pass

_noting: list[tuple[WarningLog, Callable[[], int]]] = []  # the last one gets them
_hooks: _Hooks | None = None  # while there are any


@contextmanager
def warnings_noted(log: WarningLog, step: Callable[[], int]) -> Iterator[None]:
    """Have the warnings of this process noted in `log` inside the block.

    Args:
        step: gives the updates done.
    """
    global _hooks
    own = (log, step)
    _noting.append(own)
    _hooks = _hooks or _Hooks()
    try:
        yield
    finally:
        _noting.remove(own)
        if not _noting:  # a loop that was left may end after the next has begun
            _hooks.remove()
            _hooks = None


class _Hooks:
    """Replacements for Python's functions that show warnings and make log records, which note them.

    A handler of the root logger would keep logging's own handler from printing.
    """

    def __init__(self) -> None:
        self._show: Any = warnings.showwarning
        self._make: Any = logging.getLogRecordFactory()
        warnings.showwarning = self.show
        logging.setLogRecordFactory(self.make)

    def remove(self) -> None:
        """Undo it; what others have put around them stays, and passes through."""
        if warnings.showwarning == self.show:
            warnings.showwarning = self._show
        if logging.getLogRecordFactory() == self.make:
            logging.setLogRecordFactory(self._make)

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        _note(category.__name__, lambda: message, filename, lineno)
        self._show(message, category, filename, lineno, file, line)

    def make(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*args, **kwargs)
        # None where a program makes an empty record, to fill it with another process's.
        level = record.levelno or logging.NOTSET
        if level >= logging.WARNING and not self._is_noted(record):
            _note(record.name, record.getMessage, record.pathname, record.lineno)
        return record

    def _is_noted(self, record: logging.LogRecord) -> bool:
        """Whether it is a warning of Python's that `show` has seen."""
        return record.name == _CAPTURED and warnings.showwarning == self.show


def _note(kind: str, text: Callable[[], object], path: str, line: int) -> None:
    with suppress(Exception):  # a text that fails: it must reach the screen, or fail there
        log, step = _noting[-1]
        log.note(step(), kind, text(), f"{Path(path).name}:{line}")
