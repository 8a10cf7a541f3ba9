"""How a group of ranks ended, as far as the launcher has seen it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ktrainer.launch.channel import Note


@dataclass
class End:
    """How a group ended.

    Attributes:
        code: mpirun's exit code.
        started: whether any rank came to run the script.
        said: what mpirun itself printed.
        failures: rank -> what it reported.
        interrupted: what a rank reported that was asked to end and did so, as then all do.
        gone: ranks that started and ended without a word, in that order.
        missed: the first of them that the others of a group that heals cannot go on without.
        late: why those that wait for others to start were ended; empty: they were not.
        absent: the ranks that they waited for.
        faults: rank -> stack of a crash.
        stopped_by: the signal that this process got, or `"timeout"`, or None.
        ended: ranks that came to the end of the script.
        saved: whether it was stopped before a restart that would have gone on from a checkpoint.
    """

    code: int = 0
    started: bool = False
    said: str = ""
    failures: dict[int, Note] = field(default_factory=dict)
    interrupted: Note | None = None
    gone: list[int] = field(default_factory=list)
    missed: int | None = None
    late: str = ""
    absent: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    stopped_by: int | str | None = None
    ended: set[int] = field(default_factory=set)
    saved: bool = False
