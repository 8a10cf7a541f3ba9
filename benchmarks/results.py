"""Times that benchmarks measure, and the table, the JSON file and the picture made of them.

A program that is given `--results FILE` appends one line of JSON to it for each thing that it
measured. Programs that take turns, such as one of ktrainer's and one of a peer's, append to one
file; `collect` puts together the values of all lines about the same thing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

OURS = "ktrainer"
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"


@dataclass(frozen=True)
class Result:
    """Medians of one thing that was measured, beside one peer; less is faster."""

    what: str
    sizes: str
    unit: str
    ours: float
    rounds: int  # the fewest values that one of the medians is of
    peer_name: str = ""
    peer: float | None = None
    bound_name: str = ""
    bound: float | None = None

    @property
    def to_peer(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def to_bound(self) -> float | None:
        return self.ours / self.bound if self.bound else None


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option with the file for `record`."""
    parser.add_argument("--results", type=Path, help="append what was measured to this file")


def record(
    path: Path | None,
    what: str,
    sizes: str,
    values: Mapping[str, Sequence[float]],
    bound: str = "",
    unit: str = "ms",
) -> None:
    """Append the values of all rounds, by who took them, to the file; nothing without a file.

    `bound` is that name among `values` whose time cannot be beaten. Others than `OURS` are peers.
    """
    if path is None:
        return
    line = {"what": what, "sizes": sizes, "values": dict(values), "bound": bound, "unit": unit}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def collect(path: Path) -> list[Result]:
    """Read what was recorded: one result for each thing and peer, in the order of the file."""
    things: dict[tuple[str, str], dict[str, Any]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        thing = things.setdefault((line["what"], line["sizes"]), line | {"values": {}})
        thing["bound"] = thing["bound"] or line["bound"]
        for who, values in line["values"].items():
            thing["values"].setdefault(who, []).extend(values)
    return [result for thing in things.values() for result in _results(thing)]


def _results(thing: dict[str, Any]) -> list[Result]:
    values, bound = thing["values"], thing["bound"]
    if OURS not in values:  # a peer alone, where our program failed
        return []
    shared = {
        "what": thing["what"],
        "sizes": thing["sizes"],
        "unit": thing["unit"],
        "ours": median(values[OURS]),
        "bound_name": bound,
        "bound": median(values[bound]) if bound else None,
    }
    found = []
    for peer in [who for who in values if who not in (OURS, bound)] or [""]:
        rounds = min(len(values[who]) for who in (OURS, peer, bound) if who)
        middle = median(values[peer]) if peer else None
        found.append(Result(**shared, rounds=rounds, peer_name=peer, peer=middle))
    return found


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| what | sizes | ktrainer | peer | bound | ktrainer / peer | ktrainer / bound | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = [r.what, r.sizes, _value(r.ours, r.unit)]
        cells += [_value(r.peer, r.unit, r.peer_name), _value(r.bound, r.unit, r.bound_name)]
        cells += [_value(r.to_peer), _value(r.to_bound), str(r.rounds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _value(value: float | None, unit: str = "", name: str = "") -> str:
    if value is None:
        return "-"
    number = f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    return f"{number} {unit}".strip() + (f" ({name})" if name else "")


def write_json(path: Path, results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    """Write the results with their ratios, and what they were measured on and with."""
    rows = [asdict(r) | {"to_peer": r.to_peer, "to_bound": r.to_bound} for r in results]
    path.write_text(json.dumps({**machine, "results": rows}, indent=2) + "\n")


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw a bar for each ratio as SVG, and a line at 1: bars that end before it are faster."""
    bars = [(f"{r.what}: {r.peer_name}", r.to_peer, "#219ebc") for r in results if r.to_peer]
    bars += [(f"{r.what}: {r.bound_name}", r.to_bound, "#b8c6d6") for r in results if r.to_bound]
    left, row, width, height = 440, 18, 900, 18 * len(bars) + 30
    scale = (width - left - 60) / max([1.5, *(ratio for _, ratio, _ in bars)])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (label, ratio, color) in enumerate(bars):
        top, length = place * row + 4, ratio * scale
        lines += [
            f'<text x="{left - 6}" y="{top + 11}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="14" fill="{color}"/>',
            f'<text x="{left + length + 4:.1f}" y="{top + 11}">{ratio:.2f}</text>',
        ]
    one = left + scale
    lines += [
        f'<path d="M{one:.1f} 0V{height - 24}" stroke="#d00000"/>',
        f'<text x="{left}" y="{height - 8}">time of ktrainer, in times of the peer (dark) or of '
        "the bound (light); red: 1</text>",
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n")


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the two marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
