"""What `ktrainer compare` finds in real runs, beside NumPy's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.cli.compare_command import _short
from ktrainer.cli.main import main
from ktrainer.runs.report_tables import differences
from ktrainer.runs.run_differences import RunDifferences, compare
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import NAME, append
from tests.runs.recorded import Acts, Logged, train
from tests.small import build, data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Logged]]:
    """Folders, and what the loops reported, of runs that differ in one thing each."""
    where, found = tmp_path_factory.mktemp("runs"), {}
    x, y = data()
    other = x.copy()
    other[0, 0] += 1e-3
    for name, words, rows in (
        ("a", (), None),
        ("same", (), None),
        ("order", ("data.shuffle=false",), None),
        ("later", ("lr.schedule=[{start: 8ba, multiplier: 0.5}]",), None),
        ("data", (), (other, y)),
        ("rarely", ("logging.every=4ba", "trainer.epochs=2"), None),
    ):
        logged = Logged()
        train(where / name, *words, callbacks=[logged], rows=rows)
        found[name] = (where / name, logged)
    return found


def between(runs: Any, a: str, b: str, tolerance: float = 0.0) -> RunDifferences:
    return compare(RunRecord(runs[a][0]), RunRecord(runs[b][0]), tolerance)


def truth(one: Logged, other: Logged, metric: str) -> tuple[int, float, float, float, int]:
    """By NumPy: the first step that differs, by how much, and the largest relative difference."""
    keys = [key for key in one.rows if key in other.rows and metric in one.rows[key]]
    a, b = (np.array([float(each.rows[key][metric]) for key in keys]) for each in (one, other))
    distance = np.abs(a - b)
    relative = distance / np.maximum(np.abs(a), np.abs(b))
    first, largest = int(np.flatnonzero(distance)[0]), int(np.argmax(relative))
    return keys[first][1], distance[first], relative[first], relative[largest], keys[largest][1]


def test_equal_runs(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = between(runs, "a", "same")
    assert (found.first, found.facts, found.points) == ({}, {}, 25)
    assert main(["compare", *(str(runs[name][0]) for name in ("a", "same"))]) == 0
    out = capsys.readouterr().out
    assert "no difference in 25 rows" in out
    assert "at ends of epochs, validations and every 1ba (logging.every)" in out
    assert "nothing else is known to differ" in out


@pytest.mark.parametrize("name", ["order", "later", "data"])
def test_the_first_difference(runs: Any, name: str) -> None:
    found = between(runs, "a", name)
    for metric in ("loss", "val_loss"):
        first, largest = found.first[metric], found.largest[metric]
        assert (
            first.step,
            first.absolute,
            first.relative,
            largest.relative,
            largest.step,
        ) == truth(runs["a"][1], runs[name][1], metric)
    step = next(iter(found.first.values())).step
    assert step == {"order": 1, "later": 10, "data": step}[name]
    assert found.equal_until == (None if step == 1 else step - 1)
    named = {
        "order": {"settings.data.shuffle", "data.training/order", "data.first batch/x"},
        "later": {"settings.lr.schedule"},
        "data": {"data.training/x"},
    }[name]
    assert named <= set(found.facts)
    if name == "later":
        assert set(found.facts) == named


def test_within_a_tolerance(runs: Any) -> None:
    exact = between(runs, "a", "data")
    most = max(each.relative for each in exact.largest.values())
    assert between(runs, "a", "data", most).first == {}
    loss = exact.largest["loss"]
    within = between(runs, "a", "data", np.nextafter(loss.relative, 0)).first["loss"]
    assert (within.step, within.relative) == (loss.step, loss.relative)


def test_rows_at_other_steps_are_left_out(runs: Any) -> None:
    found = between(runs, "a", "rarely")
    common = {key for key in runs["a"][1].rows if key in runs["rarely"][1].rows}
    assert (found.points, found.first) == (len(common), {})
    assert found.alone == (25 - len(common), 0)
    assert found.facts["settings.logging.every"] == ("1ba", "4ba")


def test_rows_without_a_common_metric_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, metric in (("a", "loss"), ("b", "total")):
        (tmp_path / name).mkdir()
        append(tmp_path / name / NAME, "start", step=0, epoch=0)
        values = {metric: 1.0, "speed/steps": 2.0}
        append(tmp_path / name / NAME, "epoch", step=9, epoch=1, elapsed=1.0, metrics=values)
    folders = [tmp_path / name for name in "ab"]
    assert main(["compare", *map(str, folders)]) == 2
    out = capsys.readouterr().out
    assert "no values to compare: they have none of the same metric at the same step" in out
    assert "only A has loss\nonly B has total" in out
    page = differences([RunRecord(folder) for folder in folders], ["a", "b"])
    assert (
        "no values of the same metric at the same step; only a has loss; only b has total" in page
    )


def test_as_text_and_as_json(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(runs[name][0]) for name in ("a", "later")]
    assert main(["compare", *folders]) == 1
    out = capsys.readouterr().out
    first = between(runs, "a", "later").first["loss"]
    assert "first difference: step 10 (epoch 2), in " in out
    assert "; equal up to step 9" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["loss"]]
    assert line.split()[1:4] == ["10", *map(repr, first.values)]
    assert main(["compare", "--json", *folders]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["loss"]["values"] == list(first.values)
    assert told["facts"]["settings.lr.schedule"][0] == "[]"


def test_what_a_resume_has_changed(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        train(tmp_path, callbacks=[Acts(8, fail)])
    train(tmp_path, "trainer.clip.norm=0.5")
    record = RunRecord(tmp_path)
    ((change,), _) = compare(record, record).changed
    name = "settings.trainer.clip.norm"
    assert change == {"step": 5, "name": name, "before": "None", "after": "0.5"}


def _first_batches(kind: str, folder: str) -> None:
    import tensorflow as tf

    x, y = data()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9, seed=1).batch(4)
    given = batches if kind == "tf.data" else lambda: iter([(x[:4], y[:4]), (x[4:8], y[4:8])])
    words = [f"run.dir={folder}", "logging.progress=none", "backend=data_parallel"]
    with Trainer(overrides=words) as trainer:
        trainer.fit(build, given)


@pytest.mark.parametrize("kind", ["tf.data", "generator"])
def test_the_same_data_on_one_rank_and_on_two(
    ranks: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    folders = [tmp_path / str(size) for size in (1, 2)]
    _first_batches(kind, str(folders[0]))
    ranks(2).run(_first_batches, kind, str(folders[1]))
    found = compare(*map(RunRecord, folders), tolerance=1e-5)
    assert found.first == {}
    assert found.facts["ranks"] == ("1", "2")
    assert not [name for name in found.facts if name.startswith("data.")]
    for record in map(RunRecord, folders):
        events = [*record.starts, *record.events]
        assert any("first batch/x" in name for e in events for name in e.get("data", {}))


def _copy(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    to.mkdir()
    for event in map(json.loads, (folder / NAME).read_text().splitlines()):
        if change(event) is not False:
            with (to / NAME).open("a") as file:
                file.write(json.dumps(event) + "\n")
    return str(to)


def test_only_what_both_runs_have(
    runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = str(runs["a"][0])

    def resumed(event: dict[str, Any]) -> bool:  # from another run's checkpoint of step 9
        if event["event"] == "start":
            event |= {"step": 9, "epoch": 1}
            event.pop("model")
        return event.get("step", 9) >= 9

    def stopped(event: dict[str, Any]) -> bool:
        if event["event"] == "epoch" and event["epoch"] == 2:
            event |= {"step": 9, "metrics": {"loss": "inf"}}
        return event.get("step", 0) <= 9

    part = _copy(runs["a"][0], tmp_path / "resumed", resumed)
    assert main(["compare", whole, part]) == 0
    assert "nothing else is known to differ" in capsys.readouterr().out
    cut = _copy(runs["a"][0], tmp_path / "stopped", stopped)
    assert main(["compare", whole, cut]) == 1
    assert "epoch 2 ends at step 12 in A, 9 in B" in capsys.readouterr().out
    assert main(["compare", "--json", whole, cut]) == 1

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["first"]["loss"]["relative"] == "inf"
    nothing = _copy(runs["a"][0], tmp_path / "nothing", lambda event: "metrics" not in event)
    assert main(["compare", whole, nothing]) == 2
    assert "no values to compare: B has recorded none" in capsys.readouterr().out


@pytest.mark.parametrize("tolerance", ["nan", "-1", "x"])
def test_a_tolerance_is_a_number(tolerance: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", f"--tolerance={tolerance}", "a", "b"])
    assert "argument --tolerance: " in capsys.readouterr().err


def test_long_texts_are_cut_where_they_differ() -> None:
    same = "x" * 100
    a, b = _short(f"{same}1{same}", f"{same}2{same}")
    assert max(len(a), len(b)) <= 60
    assert (a[:24], b[:24]) == (f"...{'x' * 20}1", f"...{'x' * 20}2")
