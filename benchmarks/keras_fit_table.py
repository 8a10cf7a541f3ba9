"""What the benchmarks of one process's small models share: sizes, options and names of rows."""

from __future__ import annotations

import argparse

from results import add_option

BATCH = 64
SIZES = {
    "MLP": "MLP 784-64-10",
    "MLP, arrays": "MLP 784-64-10",
    "CNN": "CNN, 8 and 16 filters",
}


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps an epoch")
    parser.add_argument("--epochs", type=int, default=4, help="epochs a round; the first compiles")
    parser.add_argument("--rounds", type=int, default=3)
    add_option(parser)
    return parser


def what_and_sizes(model: str, at_once: int | str) -> tuple[str, str]:
    """Names of a row: the step of a model and its data, with so many steps a call."""
    return f"step of {model}, {at_once} a call", f"{SIZES[model]}, batch {BATCH}, 1 process"
