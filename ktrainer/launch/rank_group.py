"""One group of ranks under mpirun: start it, read its output, wait, and end it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ktrainer.launch import orphan_prevention, process_tree
from ktrainer.launch.failure_report import describe_lost
from ktrainer.launch.group_state import (
    STACK_SECONDS,
    STACK_SIGNAL,
    GroupEnd,
    GroupState,
)
from ktrainer.launch.host_connections import HostConnections
from ktrainer.launch.launch_folders import mpi_folder, private_folder
from ktrainer.launch.mpirun_network import SAYS, ListenerWatch
from ktrainer.launch.rank_channel import (
    ON_HOSTS,
    Note,
    Options,
    RankPipes,
    fault_path,
    prepare,
)
from ktrainer.launch.rank_output import LineMerger
from ktrainer.launch.warm_process import WarmProcess

POLL_SECONDS = 0.1
HASTE_SECONDS = 0.01
FAILURE_SECONDS = 5.0  # in which mpirun ends the group once a rank has failed
JOINING_SECONDS = 5.0  # in which a process that comes too late to join others ends by itself
MISSED_SECONDS = 1.0  # in which the others report a lost rank that mpirun does not end them for
_MPIRUN_OUTPUT = 1 << 16  # bytes kept of mpirun's own output


class RankGroup:
    """Ranks started by one mpirun, from start to end.

    Args:
        ranks: the world size.
        out, err: where the ranks' output goes.
        grace: seconds that ranks have to end after SIGTERM, unless they report how long they need.
        fixed: whether `grace` overrides what they report.
        signals: those that this process has received, to be forwarded; grows while it waits.
        timeout: seconds after which the group is ended; None: never.
        joining: how many more processes may join later; with any, ranks may be lost.
        warm: a process for later groups, which is to import TensorFlow after this one has.
        hosts: connections to the ranks' hosts; None: all are on this one.
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
        joining: int = 0,
        warm: WarmProcess | None = None,
        hosts: HostConnections | None = None,
    ) -> None:
        self._hosts = hosts
        self._ranks, self._timeout = ranks + joining, timeout
        self._given, self._fixed = grace, fixed
        self._state = GroupState(ranks, heals=joining > 0)
        self._warm = warm
        self._mergers = {"out": out, "err": err}
        for merger in (out, err):
            merger.restart()
        self._pipes = RankPipes(self._ranks)
        self._mpirun_output = b""
        self._signals = signals
        self._kill_at: float | None = None
        self._others_until = 0.0  # when the last rank had not ended that others could have joined
        self.end = self._state.end

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        options: Options,
        *,
        listen: str | None,
    ) -> GroupEnd:
        """Start the group, and return when all of its processes have ended.

        Args:
            command: the mpirun command line; `{folder}` is replaced by the private folder.
            listen: the address to keep mpirun's listening sockets on; None: all.
        """
        with (
            private_folder() as name,
            mpi_folder(env) as memory,
            contextlib.closing(self._pipes),
        ):
            folder = Path(name)
            prepare(folder, self._ranks, options)
            self._pipes.open(folder)
            env = {**memory, **env}
            token = secrets.token_hex(8)
            name = name if self._hosts is None else ON_HOSTS + token
            words = [word.replace("{folder}", name) for word in command]
            if self._hosts is not None:
                words = self._hosts.open(folder, token, options, env, words)
            self._process = self._start(words, env)
            try:
                self._watch(ListenerWatch(self._process.pid, listen))
            finally:
                self._end_all()
            self._finish(folder)
            self._find_lost_hosts()
        return self.end

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        orphan_prevention.adopt_orphans()
        # Terminals belong to the launcher; in a session of its own, mpirun gets no Ctrl-C but ours.
        started = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL if os.isatty(0) else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=orphan_prevention.end_with_parent,
        )
        assert started.stdout is not None
        self._pipes.add(started.stdout, "mpirun")
        return started

    def _end_all(self) -> None:
        """End the processes that remain, all but the warm one."""
        kept = self._warm.pid if self._warm is not None else None
        if self._hosts is not None:
            self._end_on_hosts()
        process_tree.end_all(mpirun=self._process.pid, keep=kept)
        self._process.wait()
        process_tree.reap_adopted(kept)

    def _end_on_hosts(self) -> None:
        """End the ranks on all hosts, and read what they have left to say."""
        assert self._hosts is not None
        relays = threading.Thread(target=self._hosts.close)
        relays.start()  # while this thread empties the pipes that they write to
        while relays.is_alive():
            self._read(HASTE_SECONDS)
        relays.join()

    def _find_lost_hosts(self) -> None:
        """Find the hosts that cannot be reached any more, if a rank did not come to its end."""
        state = self._state
        if self._hosts is None or state.heals or state.asked_to_end or state.all_ended:
            return
        if self.end.lost:
            return
        self.end.lost = self._hosts.unreachable()
        if self.end.lost:
            self.end.code = self.end.code or 1  # mpirun calls that a success

    def _watch(self, listeners: ListenerWatch) -> None:
        began = time.monotonic()
        while self._process.poll() is None:
            # Until mpirun's sockets have been found, look often: that is how long they are open.
            self._read(POLL_SECONDS if listeners.settled else HASTE_SECONDS)
            now = time.monotonic()
            if (text := listeners.narrow_when_due(now)) is not None:
                self._print(text)
            if self._timeout is not None and now - began > self._timeout:
                self.end.stopped_by = "timeout"
                return
            if self._signals:
                self._forward(self._signals.pop(0))
            if self._warm is not None:
                self._warm.start_when_due()
            self._find_lost()
            self._end_joining(now)
            if self._is_late() or self._loses_host():
                return
            if self.end.failures:
                # Of several, mpirun ends the others; a single one is running its exit handlers.
                self._end_by(max(FAILURE_SECONDS, self._grace if self._ranks == 1 else 0.0))
            elif self.end.missed is not None:
                self._end_by(MISSED_SECONDS)
            if self._kill_at is not None and now > self._kill_at:
                return
        for _ in range(2):  # the last data of each pipe, then its end
            self._read(0)
        self._find_lost()

    def _is_late(self) -> bool:
        """Return whether ranks have waited too long for others at the start."""
        startup = self._state.startup
        if (text := startup.notice()) is not None:
            self._print(text)
        text = startup.late(self.end.ended)
        if text is None or self._kill_at is not None:
            return False
        self.end.late, self.end.absent = text, startup.missing
        if self._hosts is not None:
            self._hosts.signal(STACK_SIGNAL, startup.missing)
            self._read(STACK_SECONDS)
            time.sleep(STACK_SECONDS)
        else:
            startup.dump_stacks(self._state.started)
        return True

    def _loses_host(self) -> bool:
        """Return whether a host is lost, and the others cannot continue without its ranks."""
        if self._hosts is None or not (lost := self._hosts.find_lost()):
            return False
        self.end.lost |= lost
        if self._state.heals:
            for rank in lost:
                self._record_end(rank)
            self._print(f"{describe_lost(lost)}; the others continue if they can")
        return not self._state.heals

    def _find_lost(self) -> None:
        """Find lost ranks of a group that heals: forked children keep the pipes of a rank open."""
        if not self._state.heals:
            return
        if self._hosts is not None:
            ended = self._hosts.take_ended()
        else:
            started = self._state.started
            ended = [rank for rank, pid in started.items() if not psutil.pid_exists(pid)]
        for rank in ended:
            self._read(0)  # one read empties a pipe: how it ended, if it was reported
            self._record_end(rank)
        self._state.find_missed()

    def _end_joining(self, now: float) -> None:
        """End processes that were to join, once there is no rank left to join: MPI may have them
        wait for ever for one that is gone."""
        joining = self._state.joining_alone()
        if not joining:
            self._others_until = now
        elif now - self._others_until > JOINING_SECONDS:
            for rank in joining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._state.started[rank], signal.SIGKILL)

    def _record_end(self, rank: int) -> None:
        self._state.record_end(rank)
        out = self._mergers["out"]
        if self._state.heals and rank == out.only:  # the next rank is now the first
            out.only = min(self._state.running, default=rank)

    def _read(self, seconds: float) -> bool:
        """Handle data that has arrived; return whether there was any."""
        found = False
        for pipe, rank, data in self._pipes.read(seconds):
            found = True
            if not data:
                if pipe == "notes" and (self._hosts is None or rank in self._state.started):
                    self._record_end(rank)
            elif pipe == "notes":
                for note in self._pipes.notes(rank, data):
                    self._receive(rank, note)
            elif pipe == "mpirun":
                self._mpirun_output = (self._mpirun_output + data)[-_MPIRUN_OUTPUT:]
            else:
                self._mergers[pipe].feed(rank, data)
        return found

    def _receive(self, rank: int, note: Note) -> None:
        if note.event == "silent":
            if self._hosts is not None:
                self._hosts.kill(note.stable_ranks)
        elif note.event == "imports":
            if self._warm is not None:
                self._warm.record_import(note.text)
        elif note.event == "failed" and self._state.is_spare(rank):
            last = note.text.strip().splitlines()[-1:] or [f"exit code {note.code}"]
            self._print(f"a process that was to join, or had joined, failed: {last[0]}")
        else:
            self._state.record(rank, note)
            if note.event == "interrupted":
                self._end_by(self._grace)

    def _print(self, text: str) -> None:
        self._mergers["err"].write_line(f"ktrainer run: {text}")

    def _forward(self, number: int) -> None:
        """Forward a signal to the ranks; a second one ends them at once."""
        if self.end.stopped_by is not None:
            self._kill_at = 0.0
            return
        self.end.stopped_by = number
        self._end_by(self._grace)
        if self._hosts is not None:
            self._hosts.signal(number)
            reached = bool(self._state.started)
        else:
            ranks = []
            for pid in self._state.started.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    ranks.append(psutil.Process(pid))
            process_tree.send(ranks, number)
            reached = bool(ranks)
        if not reached:
            self._kill_at = 0.0

    @property
    def _grace(self) -> float:
        return self._given if self._fixed else self._state.grace(self._given)

    def _end_by(self, seconds: float) -> None:
        """Kill the remaining processes after so many seconds, unless that is due before."""
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(self._kill_at, at)

    def _finish(self, folder: Path) -> None:
        # All writers have ended: every pipe ends, unless it was never opened.
        while self._read(0):
            pass
        for merger in self._mergers.values():
            merger.finish()
        if self._process.returncode != 0:
            self._mergers["out"].release(sorted(self.end.failures) or range(self._ranks))
        self.end.code = self._process.returncode
        self.end.mpirun_output = self._mpirun_output.decode(errors="replace")
        for line in self.end.mpirun_output.splitlines():
            if line.startswith(SAYS):  # of the programs around its daemons
                self._mergers["err"].write_line(line)
        for rank in range(self._ranks):
            with contextlib.suppress(FileNotFoundError):
                if text := fault_path(folder, rank).read_text(errors="replace"):
                    self.end.faults[rank] = text
