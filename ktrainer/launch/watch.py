"""One group of ranks under mpirun: start it, read what it prints, wait, and end it."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ktrainer.launch import kernel, processes
from ktrainer.launch.channel import PIPES, Options, decode, fault_path, pipe_path, prepare
from ktrainer.launch.end import End
from ktrainer.launch.folders import private_folder, shared_memory_folder
from ktrainer.launch.network import narrow_to_loopback
from ktrainer.launch.output import LineMerger
from ktrainer.launch.parts import Parts
from ktrainer.launch.start import Start

POLL_SECONDS = 0.1
HASTE_SECONDS = 0.01
FAILURE_SECONDS = 5.0  # what mpirun has to end the group once a rank has failed
MISSED_SECONDS = 1.0  # what the others have to say of a rank that mpirun does not end them for
NETWORK_SECONDS = 10.0  # how long to look for listening sockets of mpirun
_CHUNK = 1 << 16
_SAID_AT_MOST = 1 << 16  # bytes kept of mpirun's own output


class Group:
    """Ranks started by one mpirun, from start to end.

    Args:
        ranks: the world size.
        out, err: where the ranks' output goes.
        grace: seconds that ranks have to end after SIGTERM, unless they say how long they need.
        fixed: whether it is so whatever they say.
        signals: those that this process has got, to be passed on; grows while it waits.
        timeout: seconds after which the group is ended; None: never.
        spare: how many more processes may join later; with any, ranks may die while they heal.
    """

    def __init__(
        self,
        ranks: int,
        out: LineMerger,
        err: LineMerger,
        *,
        grace: float,
        fixed: bool = False,
        signals: list[int],
        timeout: float | None = None,
        spare: int = 0,
    ) -> None:
        self._ranks, self._timeout = ranks + spare, timeout
        self._given, self._fixed = grace, fixed
        self._graces: dict[int, float] = {}
        self._first = ranks
        self._parts = Parts(ranks) if spare else None
        self._start_of_all = Start(ranks)
        self._mergers = {"out": out, "err": err}
        self._selector = selectors.DefaultSelector()
        self._said = b""
        self._notes: dict[int, bytes] = dict.fromkeys(range(ranks + spare), b"")
        self._started: dict[int, int] = {}
        self._signals = signals
        self._kill_at: float | None = None
        self._loopback = self._narrowed = False
        self.end = End()

    def run(
        self, command: Sequence[str], env: Mapping[str, str], options: Options, *, loopback: bool
    ) -> End:
        """Start the group, and return when nothing of it is left.

        Args:
            command: the mpirun command line; `{folder}` stands for the private folder.
            loopback: keep mpirun's listening sockets on loopback.
        """
        self._loopback = loopback
        with (
            private_folder() as name,
            shared_memory_folder(env) as memory,
            contextlib.closing(self._selector),
        ):
            folder = Path(name)
            prepare(folder, self._ranks, options)
            self._open_pipes(folder)
            words = [word.replace("{folder}", name) for word in command]
            self._process = self._start(words, {**memory, **env})
            try:
                self._watch()
            finally:
                processes.end_all(spare=self._process.pid)
                self._process.wait()
            self._finish(folder)
        return self.end

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        kernel.adopt_orphans()
        # Terminals belong to the launcher; in a session of its own, mpirun gets no Ctrl-C but ours.
        started = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL if os.isatty(0) else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=kernel.end_with_parent,
        )
        assert started.stdout is not None
        os.set_blocking(started.stdout.fileno(), False)
        self._selector.register(started.stdout, selectors.EVENT_READ, ("mpirun", -1))
        return started

    def _open_pipes(self, folder: Path) -> None:
        for rank in range(self._ranks):
            for pipe in PIPES:
                opened = os.open(pipe_path(folder, rank, pipe), os.O_RDONLY | os.O_NONBLOCK)
                self._selector.register(opened, selectors.EVENT_READ, (pipe, rank))

    def _watch(self) -> None:
        began = time.monotonic()
        while self._process.poll() is None:
            # Until mpirun's sockets have been found, look often: that is how long they are open.
            self._read(POLL_SECONDS if self._narrowed or not self._loopback else HASTE_SECONDS)
            now = time.monotonic()
            if self._loopback and now - began < NETWORK_SECONDS:
                self._keep_on_loopback()
            if self._timeout is not None and now - began > self._timeout:
                self.end.stopped_by = "timeout"
                return
            if self._signals:
                self._pass_on(self._signals.pop(0))
            self._look_for_the_dead()
            if self._is_late():
                return
            if self.end.failures:
                self._end_by(FAILURE_SECONDS)
            elif self.end.missed is not None:
                self._end_by(MISSED_SECONDS)
            if self._kill_at is not None and now > self._kill_at:
                return
        for _ in range(2):  # what each has said last, and then that it said no more
            self._read(0)
        self._look_for_the_dead()

    def _is_late(self) -> bool:
        """Whether ranks have waited too long for others at the start."""
        if (text := self._start_of_all.notice()) is not None:
            self._mergers["err"].tell(f"ktrainer run: {text}")
        text = self._start_of_all.late(self.end.ended)
        if text is None or self._kill_at is not None:
            return False
        self.end.late, self.end.absent = text, self._start_of_all.missing
        self._start_of_all.ask(self._started)
        return True

    def _look_for_the_dead(self) -> None:
        """Of a group that heals: children that a rank has forked keep its pipes open."""
        if self._parts is None:
            return
        for rank in [r for r, pid in self._started.items() if not psutil.pid_exists(pid)]:
            self._read(0)  # a pipe holds no more than one read takes: how it ended, if it said so
            self._note_gone(rank)
        self._miss()

    def _note_gone(self, rank: int) -> None:
        if rank not in self._over:
            self.end.gone.append(rank)
        out = self._mergers["out"]
        if self._parts is not None and rank == out.only:  # the next one is now the first
            out.only = min(set(self._started) - self._over, default=rank)

    @property
    def _over(self) -> set[int]:
        """Ranks that have come to an end, whichever."""
        return self.end.ended | set(self.end.failures) | set(self.end.gone)

    def _miss(self) -> None:
        """Note the first rank that has gone and is waited for, unless all are to end anyway."""
        asked = self.end.stopped_by is not None or self.end.interrupted is not None
        if self._parts is not None and self.end.missed is None and not asked:
            self.end.missed = self._parts.missed(self.end.gone)

    def _read(self, seconds: float) -> bool:
        """Handle what has arrived. Returns whether anything had."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            pipe, rank = key.data
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                self._close(key)
                if pipe == "say":
                    self._note_gone(rank)
            elif pipe == "say":
                self._hear(rank, data)
            elif pipe == "mpirun":
                self._said = (self._said + data)[-_SAID_AT_MOST:]
            else:
                self._mergers[pipe].feed(rank, data)
        return bool(ready)

    def _hear(self, rank: int, data: bytes) -> None:
        *lines, self._notes[rank] = (self._notes[rank] + data).split(b"\n")
        for line in lines:
            note = decode(line)
            if note.event == "started":
                self._started[rank] = note.pid
                self.end.started = True
            elif note.event == "grace":
                self._graces[rank] = note.seconds
            elif note.event == "opening":
                self._start_of_all.hear(rank, note.seconds)
            elif note.event == "part":
                if self._parts is not None:
                    self._parts.hear(note)
            elif note.event == "failed" and self._may_fail(rank):
                last = note.text.strip().splitlines()[-1:] or [f"exit code {note.code}"]
                text = f"a process that was to join, or had joined, failed: {last[0]}"
                self._mergers["err"].tell(f"ktrainer run: {text}")
            elif note.event == "failed":
                self.end.failures[rank] = note
            elif note.event == "interrupted":
                self.end.interrupted = note
                self._end_by(self._grace)
            else:
                self.end.ended.add(rank)

    def _may_fail(self, rank: int) -> bool:
        """Whether a failure is of one that came later, and the others go on without it."""
        return rank >= self._first and (self._parts is None or self._parts.may_go(rank))

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
        else:
            key.fileobj.close()  # type: ignore[attr-defined]

    def _keep_on_loopback(self) -> None:
        try:
            self._narrowed |= narrow_to_loopback(self._process.pid)
        except psutil.NoSuchProcess:
            return
        except OSError as error:
            self._loopback = False
            text = f"mpirun listens on all interfaces; cannot keep it on loopback: {error}"
            self._mergers["err"].tell(f"ktrainer run: {text}")

    def _pass_on(self, number: int) -> None:
        """A signal for this process is for the ranks; a second one ends them at once."""
        if self.end.stopped_by is not None:
            self._kill_at = 0.0
            return
        self.end.stopped_by = number
        self._end_by(self._grace)
        ranks = []
        for pid in self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks.append(psutil.Process(pid))
        processes.send(ranks, number)
        if not ranks:
            self._kill_at = 0.0

    @property
    def _grace(self) -> float:
        return self._given if self._fixed else max(self._graces.values(), default=self._given)

    def _end_by(self, seconds: float) -> None:
        """Kill what is left after so many seconds, unless that is due before."""
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(self._kill_at, at)

    def _finish(self, folder: Path) -> None:
        # All writers are gone: every pipe ends, unless it never began.
        while self._read(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key)
        for merger in self._mergers.values():
            merger.finish()
        if self._process.returncode != 0:
            self._mergers["out"].release(sorted(self.end.failures) or range(self._ranks))
        self.end.code = self._process.returncode
        self.end.said = self._said.decode(errors="replace")
        for rank in range(self._ranks):
            with contextlib.suppress(FileNotFoundError):
                if text := fault_path(folder, rank).read_text(errors="replace"):
                    self.end.faults[rank] = text
