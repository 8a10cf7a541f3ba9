"""What the tests have seen on a device, in results.json and results.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Results:
    """Facts of the device and of each test; written whenever one is added.

    Args:
        folder: for the two files.
    """

    folder: Path
    device: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def describe(self, facts: dict[str, Any]) -> None:
        """Set the facts of the device."""
        self.device = facts
        self._write()

    def add(self, test: str, facts: dict[str, Any]) -> None:
        """Add what a test has measured."""
        self._of(test)["seen"].update(facts)
        self._write()

    def ended(self, test: str, outcome: str, seconds: float, message: str = "") -> None:
        """Note how a test ended."""
        self._of(test).update(outcome=outcome, seconds=round(seconds, 1))
        if outcome == "failed":
            self._of(test)["message"] = message[-4000:]
        self._write()

    def as_markdown(self) -> str:
        """Two tables: the device, and the tests."""
        lines = ["| device | |", "|---|---|"]
        lines += [f"| {name} | {_text(value)} |" for name, value in self.device.items()]
        lines += ["", "| test | outcome | seconds | seen |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {test['outcome']} | {test['seconds']} | {_text(test['seen'])} |"
            for name, test in self.tests.items()
        ]
        return "\n".join(lines)

    def _of(self, test: str) -> dict[str, Any]:
        unfinished = {"outcome": "did not end", "seconds": None, "seen": {}}
        return self.tests.setdefault(test, unfinished)

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"device": self.device, "tests": self.tests}
        text = json.dumps(content, indent=2, default=str)
        (self.folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (self.folder / "results.md").write_text(self.as_markdown() + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple | set):
        return ", ".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")
