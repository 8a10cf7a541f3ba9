"""How a rank talks to the launcher: three named pipes each, in a private folder.

| pipe | carries |
|---|---|
| `RANK.out`, `RANK.err` | the rank's standard output and error, as bytes |
| `RANK.say` | JSON lines: that it started, where it is, how it failed or was interrupted, its end |

Pipes, unlike what mpirun forwards, tell the ranks apart whatever they print, lose nothing when
mpirun ends the group, and keep mpirun's own messages separate.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PIPES = ("out", "err", "say")


@dataclass(frozen=True)
class Options:
    """What the launcher tells all ranks.

    Attributes:
        cpus: for each local rank the processor numbers that it may use; empty: all.
        terminal_out, terminal_err: path of the terminal that rank 0 writes to directly, so that
            live displays work; None: it goes through its pipe like the others.
        words: those of the command line that belong to ktrainer: `key=value`, `--config FILE`.
        arguments: the script's own.
        seed: of all random numbers of a plain script: the configuration's, where it sets one, else
            one drawn for several ranks; None: there is one rank.
        ranks: how many processes are started.
    """

    cpus: list[list[int]] = field(default_factory=list)
    terminal_out: str | None = None
    terminal_err: str | None = None
    words: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    seed: int | None = None
    ranks: int = 1


@dataclass(frozen=True)
class Note:
    """One line that a rank says to the launcher.

    Attributes:
        event: it started, failed, was asked to end and did so, or reached the end of the script; or
            what `ktrainer.telling` says meanwhile.
        pid: its process id.
        time: seconds since the epoch, on that rank.
        code: the exit code that goes with a failure or interruption.
        kind: the exception's class, `"package.module.Name"`.
        text: the traceback, as Python prints it.
        follows: the failure is what one sees when another rank has gone.
        final: another try would fail in the same way, or the script itself chose to end.
        number: which part of the script begins.
        slots: the processes that are in it.
        seconds: how long it needs to end once asked to; how long it waits for all to start.
    """

    event: Literal["started", "failed", "interrupted", "ended", "part", "grace", "opening"]
    pid: int = 0
    time: float = 0.0
    code: int = 0
    kind: str = ""
    text: str = ""
    follows: bool = False
    final: bool = False
    number: int = 0
    slots: list[int] = field(default_factory=list)
    seconds: float = 0.0


def pipe_path(folder: Path, rank: int, pipe: str) -> Path:
    """Where a rank's pipe is."""
    return folder / f"{rank}.{pipe}"


def fault_path(folder: Path, rank: int) -> Path:
    """Where Python's fault handler writes a rank's stack when the process crashes."""
    return folder / f"{rank}.fault"


def prepare(folder: Path, ranks: int, options: Options) -> None:
    """Make the pipes of all ranks, and leave them the options."""
    (folder / "options.json").write_text(json.dumps(asdict(options)))
    for rank in range(ranks):
        for pipe in PIPES:
            os.mkfifo(pipe_path(folder, rank, pipe), mode=0o600)


def read_options(folder: Path) -> Options:
    """What the launcher left with `prepare`."""
    values: dict[str, Any] = json.loads((folder / "options.json").read_text())
    return Options(**values)


def encode(note: Note) -> bytes:
    """A note as one line."""
    return json.dumps(asdict(note)).encode() + b"\n"


def decode(line: bytes) -> Note:
    """The note in a line that `encode` made."""
    return Note(**json.loads(line))
