"""Results of a sweep: a table, the command that trains with the best values, and a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ktrainer import __version__
from ktrainer.cli.sweep_runs import trial_folder
from ktrainer.cli.sweep_words import SweepWords
from ktrainer.runs.sweep_page import TrialRow, row_head, sweep_page
from ktrainer.runs.sweep_summary import NAME as SUMMARY
from ktrainer.runs.sweep_summary import BestTrial
from ktrainer.runtime.private_file import write_private
from ktrainer.tuning.sweep_study import SECRET, STATES, SweepStudy
from ktrainer.tuning.sweep_trial import metric_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

PAGE = "sweep.html"


class SweepResults:
    """The results so far."""

    def __init__(
        self, study: SweepStudy, words: SweepWords, folder: Path, metric: str | None, mode: str
    ) -> None:
        self._study, self._words, self._folder = study, words, folder
        self._metric, self._mode = metric, mode
        self._failed = False  # the page could not be written, which was said

    def table(self) -> str:
        """All trials, the best first, and what to do with them."""
        keys = [space.key for space in self._words.spaces]
        rows = self._rows()
        cells = [row_head(self._name, keys), *(row.cells(keys) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row, texts in zip([None, *rows], cells, strict=True):
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
            if row is not None and row.why:
                lines.append(f"  {row.why}")
        best = self.best
        said = best.text() if best else "no trial has finished, so there is no best one"
        return "\n".join([*lines, "", said, f"page: {self._folder / PAGE}"])

    def write_page(self) -> None:
        """Write the page, and what `ktrainer runs` says; say once if that fails."""
        best = self.best
        facts = {
            "command": best.command if best else "",
            "better": "low" if self._mode == "min" else "high",
            **{name: str(value) for name, value in self._study.settings.items()},
            "words": " ".join(self._words.redacted()),
        }
        for name in ("metric", "mode", SECRET):
            facts.pop(name, None)
        name = self._folder.absolute().name
        page = sweep_page(name, self._words.spaces, self._name, self._rows(), facts, __version__)
        try:
            write_private(self._folder / PAGE, page)
            if best is not None:
                write_private(self._folder / SUMMARY, best.to_json())
        except OSError as error:
            if not self._failed:
                self._failed = True
                where, reason = self._folder / PAGE, error.strerror or error
                print(f"ktrainer sweep: {where} cannot be written: {reason}", file=sys.stderr)

    @property
    def best(self) -> BestTrial | None:
        """The best of the finished trials; None: there is none."""
        ended = [trial for trial in self._study.best if trial.state.is_finished()]
        if not ended or STATES[ended[0].state] != "finished":
            return None
        best = ended[0]
        command = self._words.command(best.params)
        value = float(best.value or 0.0)
        return BestTrial(trial_folder(best.number), self._name, value, len(ended), command)

    @property
    def _name(self) -> str:
        """The metric, as trials have found it."""
        named = (trial.user_attrs.get("metric") for trial in self._study.trials)
        return next(filter(None, named), metric_of(self._metric, True))

    def _rows(self) -> list[TrialRow]:
        return [_row(trial) for trial in self._study.best]


def _row(trial: FrozenTrial) -> TrialRow:
    facts = trial.user_attrs
    return TrialRow(
        trial.number,
        STATES[trial.state],
        trial.value,
        trial.params,
        facts.get("epochs"),
        facts.get("why", ""),
    )
