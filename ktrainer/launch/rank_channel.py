"""Communication between ranks and launcher: three named pipes per rank, in a private folder.

| pipe | carries |
|---|---|
| `RANK.out`, `RANK.err` | the rank's standard output and error, as bytes |
| `RANK.notes` | JSON lines, one `Note` each: start, phase, failure or interruption, end |

Unlike mpirun's forwarding, pipes keep the output of ranks and of mpirun apart, and lose nothing
when mpirun ends the group.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

PIPES = ("out", "err", "notes")
ON_HOSTS = "hosts:"  # and a token, instead of the folder: each host has its own
_CHUNK = 1 << 16
ENVIRONMENT = "environment.json"  # in a host's folder: variables of the ranks


@dataclass(frozen=True)
class Options:
    """Settings that the launcher passes to all ranks.

    Attributes:
        cpus: for each local rank the numbers of the processors that it may use; empty: all.
        terminal_out, terminal_err: path of the terminal that rank 0 writes to directly, so that
            live displays work; None: it uses its pipe like the others.
        words: ktrainer's part of the command line: `key=value`, `--config FILE`.
        arguments: the script's own.
        seed: seed of all random numbers of a plain script: the configuration's, else that of
            the run which it resumes, else one drawn for several ranks; None: there is one rank.
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
    """One report of a rank to the launcher.

    Attributes:
        event: the rank has started, failed, been interrupted, or reached the end of the script; or
            an event of `ktrainer.distributed.launcher_events`.
        pid: its process id.
        time: seconds since the epoch, on that rank.
        code: exit code of a failure or interruption.
        kind: the exception's class, `"package.module.Name"`.
        text: the traceback, as Python prints it; of an import of TensorFlow, the environment
            variables that the script has changed before; the path of the run's record.
        follows: the failure is a consequence of the loss of another rank.
        final: another try would fail in the same way, or the script chose its exit code.
        number: the phase of the script that begins; see `HealingPhases`.
        stable_ranks: the processes that are in it, or that did not answer.
        seconds: the time it needs to end when asked to, or waits for all ranks to start.
    """

    event: Literal[
        "started",
        "failed",
        "interrupted",
        "ended",
        "imports",
        "phase",
        "grace",
        "startup",
        "silent",
        "history",
    ]
    pid: int = 0
    time: float = 0.0
    code: int = 0
    kind: str = ""
    text: str = ""
    follows: bool = False
    final: bool = False
    number: int = 0
    stable_ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0


def host_folder(token: str) -> Path:
    """The private folder of a launch over several hosts on this one of them."""
    return Path(tempfile.gettempdir()) / f"ktrainer-{token}-{socket.gethostname()}"


def pipe_path(folder: Path, rank: int, pipe: str) -> Path:
    """Path of a rank's pipe."""
    return folder / f"{rank}.{pipe}"


def open_pipe(path: Path) -> int:
    """Open a rank's pipe for writing.

    Raises:
        SystemExit: the launcher does not read it any more; to wait for a reader would never end.
    """
    try:
        opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise SystemExit(
            f"ktrainer: the launcher does not read {path.name} of this process: it has ended, or "
            "another process had this number before"
        ) from None
    os.set_blocking(opened, True)
    return opened


def fault_path(folder: Path, rank: int) -> Path:
    """Path of the file to which Python's fault handler writes a rank's stack."""
    return folder / f"{rank}.fault"


def prepare(folder: Path, ranks: int, options: Options) -> None:
    """Create the pipes of all ranks, and write the options for them."""
    (folder / "options.json").write_text(json.dumps(asdict(options)))
    for rank in range(ranks):
        for pipe in PIPES:
            os.mkfifo(pipe_path(folder, rank, pipe), mode=0o600)


def read_options(folder: Path) -> Options:
    """Read the options that `prepare` wrote."""
    values: dict[str, Any] = json.loads((folder / "options.json").read_text())
    return Options(**values)


def encode(note: Note) -> bytes:
    """Encode a note as one line."""
    return json.dumps(asdict(note)).encode() + b"\n"


def decode(line: bytes) -> Note:
    """Decode a line that `encode` made."""
    return Note(**json.loads(line))


class RankPipes:
    """The launcher's ends of the pipes of all ranks.

    Args:
        ranks: how many have pipes.
    """

    def __init__(self, ranks: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._lines = dict.fromkeys(range(ranks), b"")  # the incomplete last line of each

    def open(self, folder: Path) -> None:
        """Open the pipes that `prepare` made."""
        for rank in self._lines:
            for pipe in PIPES:
                opened = os.open(pipe_path(folder, rank, pipe), os.O_RDONLY | os.O_NONBLOCK)
                self._selector.register(opened, selectors.EVENT_READ, (pipe, rank))

    def add(self, file: IO[bytes], name: str) -> None:
        """Read another file too, as the pipe `name` of rank -1."""
        os.set_blocking(file.fileno(), False)
        self._selector.register(file, selectors.EVENT_READ, (name, -1))

    def read(self, seconds: float) -> Iterator[tuple[str, int, bytes]]:
        """Pipe, rank and data of what has arrived, waiting at most so many seconds; at a pipe's
        end its data is empty."""
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                self._close(key)
            yield (*key.data, data)

    def notes(self, rank: int, data: bytes) -> list[Note]:
        """The notes that are complete with `data` of a rank."""
        *lines, self._lines[rank] = (self._lines[rank] + data).split(b"\n")
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Close the pipes that have not come to their end."""
        for key in list(self._selector.get_map().values()):
            self._close(key)
        self._selector.close()

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
        else:
            key.fileobj.close()  # type: ignore[attr-defined]
