"""A thread that sends the final rows of a run to a tracker.

What it does is kept in the run's folder before it does it: the token of the run in the tracker,
the last step that it sends, and how much of the record was read by then. After a kill the tracker
itself says what it holds, so no step is sent twice or left out.

Where training returns to before a step that was sent (it starts from scratch, or resumes from an
older checkpoint), what the tracker holds is no longer what happened. It cannot take that back, so
it gets a new run with all rows that count.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktrainer.callbacks.trackers.final_rows import FinalRows
from ktrainer.callbacks.trackers.tracker_run import RunFacts, TrackerRun
from ktrainer.config.redact import redact_text
from ktrainer.runtime.code_version import uncommitted_changes
from ktrainer.runtime.private_file import write_private

_POSITION = ("event", "fit", "inside", "time", "step", "epoch", "batch")
_NOT_SHOWN = (*_POSITION, "settings", "pid", "resume")
_DIFF_BYTES = 10 * 2**20

Opener = Callable[[Mapping[str, Any], RunFacts], TrackerRun]


class Sender:
    """Sends rows in the background until `close`.

    Args:
        opener: class of the tracker's runs.
        arguments: the user's, of the tracker's `init`.
        record: `history.jsonl` of the run.
        state: the file of what was sent.
        fit, live: as for `FinalRows`.
        hidden: secrets, which no tracker gets.

    Attributes:
        problem: the last error of the tracker; None if the last attempt succeeded.
    """

    def __init__(
        self,
        opener: Opener,
        arguments: Mapping[str, Any],
        record: Path,
        state: Path,
        fit: tuple[int, int],
        live: bool,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self._opener, self._arguments, self._hidden = opener, arguments, hidden
        self._record, self._state, self._fit, self._live = record, state, fit, live
        self._token = ""
        self._run: TrackerRun | None = None
        self._rows: FinalRows | None = None
        self._awake = threading.Event()
        self._reason: str | None = None
        self._closing: float | None = None  # since when
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._work, name="ktrainer-tracker", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for new rows."""
        self._awake.set()

    def finish(self, reason: str | None) -> None:
        """Have what is final sent, and the thread end.

        Args:
            reason: how the run has ended.
        """
        if self._closing is None:
            self._reason, self._closing = reason, time.monotonic()
            self._awake.set()

    def close(self, reason: str | None, seconds: float) -> int:
        """`finish`, and wait for that; return the number of steps that were not sent.

        Args:
            reason: how the run has ended.
            seconds: the longest time since the first `finish`.
        """
        self.finish(reason)
        assert self._closing is not None
        self._thread.join(max(0.0, self._closing + seconds - time.monotonic()))
        if self._thread.is_alive():
            self.problem = self.problem or f"it did not answer within {seconds:.0f} s"
        return self._count_missing() if self.problem is not None else 0

    def _count_missing(self) -> int:
        """Steps with rows that were not sent; the thread may not have read them."""
        sent = -1 if self._rows is None else self._rows.sent
        rows = FinalRows(self._record, self._fit, self._live, sent)
        try:
            rows.read()
        except OSError:
            return 0
        return rows.waiting

    # -- the thread

    def _work(self) -> None:
        closing = False
        while not closing:
            self._awake.wait()
            self._awake.clear()
            closing = self._closing is not None
            self._attempt(self._send)
        if self._run is not None and self.problem is None:
            run = self._run
            self._attempt(lambda: run.close(self._reason))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Let no error of a tracker's out: it is tried again with the next rows."""
        try:
            action()
            self.problem = None
        except BaseException as error:  # libraries call sys.exit, too
            first = str(error).strip().partition("\n")[0]
            self.problem = redact_text(f"{type(error).__name__}: {first}", self._hidden)

    def _send(self) -> None:
        if self._rows is None:
            saved = self._load()
            self._token = saved["token"]
            self._rows = FinalRows(
                self._record, self._fit, self._live, saved["sent"], saved["offset"]
            )
        self._rows.read()
        if self._rows.start is None:
            return
        if self._rows.returned:
            self._begin_again()
        if self._run is None:
            self._save(self._rows.sent)
            self._run = self._opener(self._arguments, self._facts(self._rows))
            self._rows.mark_sent(self._run.held())
        if points := self._rows.points():
            self._save(points[-1].step)
            self._run.send(points)
            self._rows.mark_sent(points[-1].step)

    def _begin_again(self) -> None:
        """A new run in the tracker, with all rows that count."""
        run, self._run = self._run, None
        if run is not None:
            run.close(None)
        self._token = secrets.token_hex(6)
        self._rows = FinalRows(self._record, self._fit, self._live)
        self._rows.read()

    def _facts(self, rows: FinalRows) -> RunFacts:
        start, folder = rows.start or {}, self._record.parent
        words = "\n".join(sys.argv[1:])
        diff = uncommitted_changes(Path(sys.argv[0])) or b""
        fit, inside = self._fit
        name = (
            folder.name + (f"-{fit}" if fit > 1 else "") + (f"-inside-{inside}" if inside else "")
        )
        return RunFacts(
            self._token,
            name,
            folder,
            start.get("settings", {}),
            {name: value for name, value in start.items() if name not in _NOT_SHOWN},
            rows.sent,
            redact_text(diff[:_DIFF_BYTES].decode(errors="replace"), self._hidden),
            redact_text(words, self._hidden) != words,
        )

    # -- the file

    def _load(self) -> dict[str, Any]:
        try:
            found = json.loads(self._state.read_text(encoding="utf-8"))
            whole = {name: int(found[name]) for name in ("sent", "offset")}
            return {"token": str(found["token"]), **whole}
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
            return {"token": secrets.token_hex(6), "sent": -1, "offset": 0}

    def _save(self, sent: int) -> None:
        """Keep what will be done next, as this process may be killed while it does it."""
        assert self._rows is not None
        saved = {"token": self._token, "sent": sent, "offset": self._rows.offset}
        write_private(self._state, json.dumps(saved) + "\n")
