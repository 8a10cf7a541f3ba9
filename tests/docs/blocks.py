"""The code blocks of the README and the docs, and what they expect.

A comment before a block says what is special about it:

    <!-- file: train.py -->      the block is a file that later commands of the page use
    <!-- not run: REASON -->     it cannot run here; its syntax and options are checked
    <!-- status: 2 -->           its commands end with this exit status

Expected output is in the `console` block itself, or in an `output` block after a `python` block.
`...` stands for anything. Numbers with a decimal point may differ by two percent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_COMMENT = re.compile(r"<!-- (file|not run|status): (.+?) -->")
_NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
_TOLERANCE = 0.02


@dataclass
class Block:
    """A fenced block of a page.

    Attributes:
        page: the file that holds it.
        line: where it starts.
        language: the word after the fence.
        text: what is inside.
        marks: what the comment before it says.
    """

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command of a console session, with the output that it quotes."""
        command, output = "", []
        for line in self.text.replace("\\\n> ", "").replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, "\n".join(output)
                command, output = line[2:], []
            else:
                output.append(line)
        assert command, f"{self.where}: no command; begin one with '$ '"
        yield command, "\n".join(output)


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        if match := re.fullmatch(r"(`{3,})(.*)", line):
            body = []
            for _, inner in lines:
                if inner == match[1]:
                    break
                body.append(inner)
            blocks.append(Block(page, number, match[2].strip(), "\n".join(body) + "\n", marks))
            marks = {}
        elif match := _COMMENT.fullmatch(line):
            marks = {**marks, match[1]: match[2]}
        else:
            assert "```" not in line or "`" not in line.replace("```", ""), (
                f"{page.name}:{number}: begin fences at the start of a line"
            )
            if line.strip():
                marks = {}
    return blocks


def difference(expected: str, actual: str) -> str | None:
    """Why `actual` is not what a page quotes; None if it is."""
    if _match(_lines(expected), _lines(actual)):
        return None
    return f"expected:\n{expected.strip()}\ngot:\n{actual.strip()}"


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _match(expected: list[str], actual: list[str]) -> bool:
    """Whether all lines match; a line `...` stands for any number of lines."""
    if not expected:
        return not actual
    if expected[0] == "...":
        return any(_match(expected[1:], actual[i:]) for i in range(len(actual) + 1))
    return bool(actual) and _same(expected[0], actual[0]) and _match(expected[1:], actual[1:])


def _same(expected: str, actual: str) -> bool:
    """Whether a line matches: `...` stands for anything, numbers are close."""
    parts = re.split(rf"({_NUMBER.pattern})", expected)
    texts = [re.escape(part).replace(r"\.\.\.", ".*?") for part in parts[::2]]
    match = re.fullmatch(rf"({_NUMBER.pattern})".join(texts), actual)
    return match is not None and all(
        abs(float(said) - float(number)) <= _TOLERANCE * abs(float(said))
        for said, number in zip(parts[1::2], match.groups(), strict=True)
    )
