"""Summary of a sweep for `ktrainer runs`: its best trial, and how to train with its values.

Imports only the standard library.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "sweep.json"


@dataclass(frozen=True)
class BestTrial:
    """The best trial of a sweep.

    Attributes:
        run: the name of its run's folder, in that of the sweep.
        metric, value: what trials are compared by, and its own.
        trials: how many have ended.
        command: what trains with its values.
    """

    run: str
    metric: str
    value: float
    trials: int
    command: str

    def text(self) -> str:
        """Two lines: which one it is, and the command."""
        trials = "1 trial" if self.trials == 1 else f"{self.trials} trials"
        best = f"the best of {trials}: {self.run}, {self.metric} {self.value:.5g}"
        return f"{best}\ntrain with the best: {self.command}"

    def to_json(self) -> str:
        """The content of its file, for `read_best_trial`."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_best_trial(folder: Path) -> BestTrial | None:
    """The best trial of the sweep in `folder`; None: it has none, or there is no sweep."""
    try:
        known = json.loads((folder / NAME).read_text(encoding="utf-8"))
        texts = {name: str(known[name]) for name in ("run", "metric", "command")}
        return BestTrial(**texts, value=float(known["value"]), trials=int(known["trials"]))
    except (OSError, ValueError, TypeError, KeyError):  # missing, or not ours
        return None
