"""`ktrainer checkpoint import` of the files of this folder, and what is then restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint import resume
from ktrainer.cli import main
from ktrainer.distributed import SingleWorld

FILES = Path(__file__).parent
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(24, 4)), RANDOM.normal(size=(24, 1))


def truth(name: str) -> dict[str, np.ndarray]:
    with np.load(FILES / f"{name}.npz") as file:
        return dict(file)


def imports(file: str | Path, model: str, *words: str) -> int:
    function = f"tests.checkpoint.keras2.models:{model}"
    command = ["checkpoint", "import", str(FILES / file), "--model", function, "--out", "out"]
    return main.main([*command, *words])


def imported() -> Path:
    (path,) = Path("out").glob("step-*")
    return path


def restored(model: Any) -> Any:
    progress = resume(str(imported()), "out", model=model, world=SingleWorld())
    assert progress is not None
    assert progress.epoch == progress.batch == 0
    return progress


def in_order(words: list[str], line: str) -> bool:
    """Return whether a line has these words in this order."""
    for word in words:
        _, found, line = line.partition(word)
        if not found:
            return False
    return True
