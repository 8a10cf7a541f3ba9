"""Rows that are final: none that training may repeat, none twice, none left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktrainer.callbacks.trackers.final_rows import FinalRows
from ktrainer.runtime import history_file


class Record:
    """A record that is written as a run does, one event after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / history_file.NAME

    def start(self, step: int = 0, epoch: int = 0, fit: int = 1) -> None:
        history_file.append(self.path, "start", fit=fit, step=step, epoch=epoch)

    def rows(self, *steps: int, value: float = 0.0, fit: int = 1) -> None:
        for step in steps:
            metrics = {"loss": step + value}
            history_file.append(self.path, "log", fit=fit, step=step, epoch=1, metrics=metrics)

    def saved(self, step: int, fit: int = 1) -> None:
        history_file.append(self.path, "checkpoint", fit=fit, step=step, path="x")

    def add(self, event: str, **fields: Any) -> None:
        history_file.append(self.path, event, fit=1, **fields)


def sent(rows: FinalRows) -> list[int]:
    """The steps that are ready, which count as sent from then on."""
    rows.read()
    points = rows.points()
    if points:
        rows.mark_sent(points[-1].step)
    return [point.step for point in points]


def test_rows_are_final_once_a_later_step_is_saved(tmp_path: Path) -> None:
    """Those of the saved step are not: its epoch may end after it."""
    record = Record(tmp_path)
    rows = FinalRows(record.path, (1, 0), live=False)
    assert sent(rows) == []
    record.start()
    record.rows(1, 2, 3)
    assert sent(rows) == []
    record.saved(3)
    assert sent(rows) == [1, 2]
    record.add("epoch", step=3, epoch=1, metrics={"loss": 0.5, "val_loss": 0.25})
    record.rows(4)
    record.saved(4)
    rows.read()
    (point,) = rows.points()
    expected = {"train/loss": 3.0, "epoch/loss": 0.5, "validation/loss": 0.25}
    assert (point.step, point.values) == (3, expected)
    record.add("end", reason="finished")
    assert sent(rows) == [3, 4]
    assert rows.waiting == 0


def test_repeated_steps_are_sent_once(tmp_path: Path) -> None:
    """After a kill, and after a rollback, whose rows are those of the second time."""
    record = Record(tmp_path)
    record.start()
    record.rows(1, 2, 3)
    record.saved(2)
    rows = FinalRows(record.path, (1, 0), live=False)
    assert sent(rows) == [1]
    record.start(step=2)  # killed
    record.rows(3, 4, value=0.5)
    again = FinalRows(record.path, (1, 0), live=False, sent=1, offset=rows.offset)
    assert sent(again) == []
    record.add("rollback", step=2, epoch=0)
    record.rows(3, 4, value=0.25)
    record.saved(5)
    again.read()
    values = {point.step: point.values["train/loss"] for point in again.points()}
    assert values == {2: 2.0, 3: 3.25, 4: 4.25}
    assert not again.returned


def test_without_checkpoints_a_row_waits_for_the_next(tmp_path: Path) -> None:
    record = Record(tmp_path)
    rows = FinalRows(record.path, (1, 0), live=True)
    record.start()
    record.rows(1, 2, 3)
    assert sent(rows) == [1, 2]
    assert rows.waiting == 1
    assert not rows.returned
    record.start()  # from scratch
    rows.read()
    assert rows.returned


def test_a_return_that_was_seen_before_does_not_count_again(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.start()
    record.rows(1, 2)
    record.start()
    record.rows(1, 2, 3)
    rows = FinalRows(record.path, (1, 0), live=True)
    assert sent(rows) == [1, 2]
    again = FinalRows(record.path, (1, 0), live=True, sent=2, offset=rows.offset)
    again.read()
    assert not again.returned


@pytest.mark.parametrize(("more", "returned"), [(0.0, False), (0.5, True)])
def test_an_extension_repeats_what_followed_the_last_checkpoint(
    tmp_path: Path, more: float, returned: bool
) -> None:
    """The run is another one only if a row differs. It is killed once, and returns again."""
    record = Record(tmp_path)
    record.start()
    record.rows(1, 2, 3, 4)
    record.saved(2)
    record.add("end", reason="finished")
    rows = FinalRows(record.path, (1, 0), live=False)
    assert sent(rows) == [1, 2, 3, 4]
    known = rows.offset
    for _ in range(2):
        record.start(step=2)
        record.rows(3, value=more)
        rows = FinalRows(record.path, (1, 0), live=False, sent=4, offset=known)
        assert sent(rows) == []
        assert rows.returned is returned
    record.rows(4, 5, 6)
    record.saved(6)
    assert sent(rows) == [5]
    record.start(step=2)
    rows.read()
    assert rows.returned


def test_each_fit_has_its_own_rows(tmp_path: Path) -> None:
    """A script that begins from scratch trains its second `fit` again, too."""
    record = Record(tmp_path)
    record.start()
    record.rows(1, 2)
    record.start(fit=2)
    record.rows(1, 2, 3, fit=2)
    second = FinalRows(record.path, (2, 0), live=True)
    assert sent(second) == [1, 2]
    record.start()
    second.read()
    assert second.returned


def test_an_epoch_that_a_rollback_has_gone_back_over(tmp_path: Path) -> None:
    """Its row stands, but trackers take steps in order only."""
    record = Record(tmp_path)
    rows = FinalRows(record.path, (1, 0), live=False)
    record.start()
    record.rows(1, 2, 3, 4)
    record.saved(2)
    record.add("epoch", step=4, epoch=1, metrics={"loss": 0.5})
    record.add("rollback", step=2, epoch=1)
    assert sent(rows) == [1]
    record.rows(3, value=0.25)
    record.add("epoch", step=3, epoch=2, metrics={"loss": 0.25})
    record.rows(4)
    record.add("end", reason="finished")
    rows.read()
    values = {point.step: point.values for point in rows.points()}
    assert list(values) == [2, 3, 4]
    assert values[3] == {"train/loss": 3.25, "epoch/loss": 0.25}
    assert values[4] == {"train/loss": 4.0}
