"""Merge the output of ranks line by line, each with its rank as prefix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

_LONGEST = 1 << 16  # bytes of one line; a longer one is cut, so that memory stays bounded
_KEPT = 1 << 16  # last bytes held back of one rank
_CLEAR_LINE = b"\r\x1b[2K"


class LineMerger:
    """Writes whole lines of several ranks to one stream.

    Args:
        stream: where lines go.
        ranks: the world size; decides the width of the prefix.
        prefix: put `[rank] ` before each line.
        beside_display: rank 0 draws on the same terminal. A line of another rank first clears the
            line of the cursor, and rank 0 redraws its display below.
        drop: texts; lines that contain one are dropped, with the empty lines after them.
        only: the rank that is shown; the last lines of the others are held back, for `release`.
            None shows all.
    """

    def __init__(
        self,
        stream: BinaryIO,
        ranks: int,
        *,
        prefix: bool = True,
        beside_display: bool = False,
        drop: tuple[bytes, ...] = (),
        only: int | None = None,
    ) -> None:
        self._stream = stream
        width = len(str(ranks - 1))
        self._prefixes = [f"[{r:>{width}}] ".encode() if prefix else b"" for r in range(ranks)]
        self._partial = [b""] * ranks
        self._drop, self._dropping = drop, [False] * ranks
        self._lead = _CLEAR_LINE if beside_display else b""
        self.only = only
        self._kept: dict[int, bytes] = {}

    def restart(self) -> None:
        """Begin with ranks that have just been started: of them rank 0 is shown, if one is."""
        self.only = None if self.only is None else 0
        self._kept.clear()

    def feed(self, rank: int, data: bytes) -> None:
        """Add bytes of a rank, and write the lines that they complete."""
        *lines, rest = (self._partial[rank] + data).split(b"\n")
        while len(rest) > _LONGEST:
            lines.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._partial[rank] = rest
        self._write(rank, lines)

    def release(self, ranks: Iterable[int]) -> None:
        """Write the output of `ranks` that was held back."""
        for rank in ranks:
            kept = self._kept.pop(rank, b"")
            whole = kept if len(kept) < _KEPT else b"[...]" + kept[kept.find(b"\n") :]
            self._show(rank, whole.splitlines())

    def write_line(self, line: str) -> None:
        """Write a line of the launcher."""
        self._stream.write(self._lead + line.encode() + b"\n")
        self._stream.flush()

    def finish(self) -> None:
        """Write incomplete lines."""
        for rank, rest in enumerate(self._partial):
            if rest:
                self._write(rank, [rest])
        self._partial = [b""] * len(self._partial)

    def _is_dropped(self, rank: int, line: bytes) -> bool:
        dropped = any(text in line for text in self._drop) or (self._dropping[rank] and not line)
        self._dropping[rank] = dropped
        return dropped

    def _write(self, rank: int, lines: list[bytes]) -> None:
        if self._drop:
            lines = [line for line in lines if not self._is_dropped(rank, line)]
        if self.only in (None, rank):
            self._show(rank, lines)
        else:
            more = b"".join(line + b"\n" for line in lines)
            self._kept[rank] = (self._kept.get(rank, b"") + more)[-_KEPT:]

    def _show(self, rank: int, lines: list[bytes]) -> None:
        if lines:
            prefix = self._lead + self._prefixes[rank]
            self._stream.write(b"".join(prefix + line + b"\n" for line in lines))
            self._stream.flush()
