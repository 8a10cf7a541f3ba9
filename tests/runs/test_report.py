"""`ktrainer report`: what the page says of real runs, and how a real browser shows it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ktrainer.cli.main import main
from ktrainer.launch.exit_report import record_end
from ktrainer.launch.group_state import GroupEnd
from ktrainer.runs.report_data import page_data, run_names, time_shares, total_shares
from ktrainer.runs.report_page import report_page
from ktrainer.runs.report_tables import MOST_MARKS, marks_table
from ktrainer.runs.run_curves import MOST_POINTS, PARTS, row_axes, run_curves
from ktrainer.runs.run_marks import run_marks, run_spans, stood_out
from ktrainer.runs.run_record import RunRecord
from ktrainer.runs.weight_digests import weight_digests
from ktrainer.runtime.history_file import NAME, append
from tests.processes import ktrainer, python, script
from tests.runs.browser import Browser
from tests.runs.recorded import EPOCHS, STEPS, train

SCRIPT = Path(__file__).parent / "recorded.py"
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "<!--<script>",
    "a'b\"c\\d\u2028\n{x} {data} $x^$",
    "\ud800 \x00 ​",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was killed before update 8 and resumed, and an undisturbed one of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    killed = script(SCRIPT, folder / "killed", 8, KERAS_BACKEND="tensorflow")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train(folder / "killed")
    train(folder / "other", "seed=4")
    return folder / "killed", folder / "other"


class Texts(HTMLParser):
    """The elements of a page, the texts of its table cells, and the JSON that it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.data = ""
        self._at: list[str] = []
        self._is_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._is_data = tag == "script" and ("id", "data") in attrs
        if tag in ("td", "th"):
            self.cells.append("")
            self._at.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._is_data = False
        if self._at and tag == self._at[-1]:
            self._at.pop()

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data += data
        if self._at:
            self.cells[-1] += data


def record(folder: Path, *events: dict[str, Any]) -> RunRecord:
    """A run of which the record has these events."""
    folder.mkdir(parents=True, exist_ok=True)
    for event in events:
        fields = dict(event)
        append(folder / NAME, fields.pop("event"), **fields)
    return RunRecord(folder)


def log(step: int, epoch: int = 1, event: str = "log", **metrics: Any) -> dict[str, Any]:
    values = metrics or {"loss": float(step)}
    return {"event": event, "step": step, "epoch": epoch, "elapsed": step / 2, "metrics": values}


START = {"event": "start", "step": 0, "epoch": 0, "ranks": 2, "epochs": 2, "settings": {"seed": 1}}


# -- the page in a browser


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_browser_shows_the_page(
    runs: tuple[Path, Path], tab: Browser, tmp_path: Path, dark: bool, width: int
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--output", str(page)]) == 0
    tab.open(page, width, dark=dark)
    assert tab.errors == []
    assert tab.requests == [page.as_uri()]
    figures = "document.querySelectorAll('#charts figure').length"
    assert tab.evaluate(figures) == 2  # loss and accuracy
    paths = "[...document.querySelectorAll('#charts svg path.curve')].map(p => p.getAttribute('d'))"
    lines = [path for path in tab.evaluate(paths) if path != "M0 4H26"]
    assert len(lines) == 2 * 2 * 2  # of each run, training and validation
    assert all(path.startswith("M") and "NaN" not in path for path in lines)
    assert tab.evaluate("document.querySelectorAll('#timeline rect').length") >= 3
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    light = "getComputedStyle(document.body).backgroundColor"
    assert (tab.evaluate(light) == "rgb(19, 20, 23)") == dark
    assert tab.evaluate("document.fonts.size") == 0


def test_the_switches_of_the_page(runs: tuple[Path, Path], tab: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--output", str(page)]) == 0
    tab.open(page)
    figure = "document.querySelector('#charts figure')"
    lines = f"[...{figure}.querySelectorAll(':scope > svg path')].map(p => p.getAttribute('d'))"
    ticks = f"[...{figure}.querySelectorAll(':scope > svg text')].map(t => t.textContent).join()"
    seen = [tab.evaluate(f"{ticks} + {lines}")]
    boxes = "[...document.querySelectorAll('#toolbar input[type=checkbox]')]"
    smooth = "document.getElementById('smoothing')"
    for change in (
        "document.querySelector('input[value=step]').click()",
        "document.querySelector('input[value=time]').click()",
        f"{boxes}[0].click()",  # log scale
        f"{smooth}.value = 0.9; {smooth}.dispatchEvent(new Event('input'))",
        f"{boxes}[2].click()",  # the first run
    ):
        tab.evaluate(change)
        seen.append(tab.evaluate(f"{ticks} + {lines}"))
    assert len(set(seen)) == len(seen)
    assert len(tab.evaluate(lines)) == 4  # of the second run: smoothed, and the values behind
    marks = f"{figure}.querySelectorAll(':scope > svg .mark').length"
    tab.evaluate(f"{boxes}[2].click()")
    assert tab.evaluate(marks) > 0
    tab.evaluate(f"{boxes}[1].click()")
    assert tab.evaluate(marks) == 0
    themes = []
    for _ in range(3):
        themes.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.evaluate("document.getElementById('theme').click()")
    assert themes == ["rgb(247, 247, 245)", "rgb(247, 247, 245)", "rgb(19, 20, 23)"]
    move = "new PointerEvent('pointermove', {clientX: 300, clientY: 300, bubbles: true})"
    tab.evaluate(f"{figure}.querySelector(':scope > svg').dispatchEvent({move})")
    assert "killed: training" in tab.evaluate(f"{figure}.querySelector('.tip').textContent")
    assert tab.errors == []


def test_names_and_texts_cannot_change_the_page(tab: Browser, tmp_path: Path) -> None:
    metrics = dict(zip(HOSTILE, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    events = [
        {**START, "host": HOSTILE[0], "versions": {HOSTILE[1]: HOSTILE[2]}, "settings": metrics},
        log(1, **metrics),
        log(2, **metrics),
        {"event": "slow", "step": 2, "rank": 1, "cause": "x", "message": HOSTILE[1]},
        {"event": "times", "step": 2, "epoch": 1, "ranks": [dict.fromkeys(HOSTILE, 1.0)]},
        {"event": "end", "reason": HOSTILE[2], "why": HOSTILE[0]},
    ]
    folder = tmp_path / "<b>run & 'co'"
    record(folder, *events)
    (folder / "config.diff.yaml").write_text(HOSTILE[0])
    page = tmp_path / "report.html"
    assert main(["report", str(folder), str(folder), "--output", str(page)]) == 0
    texts = Texts(page.read_text())
    assert texts.tags.count("script") == 2
    assert "img" not in texts.tags
    names = {curve["metric"] for curve in json.loads(texts.data)["runs"][0]["fits"]["1"]["curves"]}
    assert names == set(HOSTILE)
    assert {HOSTILE[0], HOSTILE[1]} <= set(texts.cells)
    tab.open(page)
    assert tab.evaluate("document.title").startswith("ktrainer report")
    assert tab.errors == []
    assert tab.evaluate("document.querySelectorAll('#charts figure').length") == len(HOSTILE)
    assert tab.requests == [page.as_uri()]


def test_values_that_are_no_numbers_are_shown(tab: Browser, tmp_path: Path) -> None:
    values = [1.0, float("nan"), 2.0, float("inf"), float("-inf"), -3.0]
    rows = [log(step, loss=value) for step, value in enumerate(values, 1)]
    run = record(tmp_path / "run", START, *rows, log(6, val_gone=float("nan")))
    page = tmp_path / "report.html"
    page.write_text(report_page([run], "1"))
    tab.open(page)
    crosses = (
        "[...document.querySelectorAll('#charts .glyph')].filter(t => t.textContent == '\u00d7')"
    )
    assert tab.evaluate(f"{crosses}.length") == 4
    tab.evaluate("document.querySelectorAll('#toolbar input[type=checkbox]')[0].click()")
    assert tab.errors == []
    assert "loss is nan at step 2 (epoch 1)" in stood_out(run)


# -- what the page says


def test_what_happened_in_a_killed_run(runs: tuple[Path, Path]) -> None:
    run = RunRecord(runs[0])
    found = [(mark.kind, mark.step) for mark in run_marks(run)]
    assert found == [
        ("start", 0),
        ("checkpoint", 5),
        ("interrupted", 8),
        ("resume", 5),
        ("checkpoint", 10),
        ("checkpoint", 15),
        ("finished", 18),
    ]
    times = [mark.time for mark in run_marks(run)]
    assert times == sorted(times)
    first, second = run_spans(run)
    assert first.end < second.begin
    assert "continued after step 5 on 1 process" in stood_out(run)


def test_a_checkpoint_may_come_after_the_end(tmp_path: Path) -> None:
    """One that was being written as training failed."""
    end = {"event": "end", "reason": "failed", "why": "ValueError: planted"}
    saved = {"event": "checkpoint", "step": 5, "path": "step-5"}
    kinds = ["start", "failed", "checkpoint"]
    run = record(tmp_path, {**START, "host": socket.gethostname()}, log(5), end, saved)
    assert [mark.kind for mark in run_marks(run)] == kinds
    record_end(GroupEnd(history=str(tmp_path / NAME)), "interrupted", "SIGTERM")
    assert [mark.kind for mark in run_marks(RunRecord(tmp_path))] == kinds
    # Without the rank that failed, the others continued, and were killed.
    killed = record(tmp_path, {"event": "ranks", "step": 5, "epoch": 0})
    assert [mark.kind for mark in run_marks(killed)][3:] == ["ranks", "interrupted"]


def test_of_many_marks_the_newest_are_shown(tmp_path: Path) -> None:
    slow = [
        {"event": "slow", "step": k, "cause": "compute", "message": f"slow at {k}"}
        for k in range(MOST_MARKS + 9)
    ]
    page = Texts(marks_table(record(tmp_path, START, *slow), "run"))
    shown = [text for text in page.cells if text.startswith("slow at")]
    assert shown[-1] == f"slow at {MOST_MARKS + 8}"
    assert MOST_MARKS - 1 <= len(shown) <= MOST_MARKS


def test_curves_have_all_values(runs: tuple[Path, Path]) -> None:
    run = RunRecord(runs[1])
    (fit,) = page_data([run])["runs"][0]["fits"].values()
    curves = {(c["metric"], c["validation"]): c for c in fit["curves"]}
    assert list(curves) == [
        ("loss", False), ("loss", True), ("accuracy", False), ("accuracy", True),
    ]  # fmt: skip
    rows = {row["step"]: row["metrics"]["loss"] for row in run.rows if "loss" in row["metrics"]}
    loss = curves["loss", False]
    assert loss["step"] == list(rows) == list(range(1, EPOCHS * STEPS + 1))
    assert loss["value"] == pytest.approx(list(rows.values()), rel=1e-6)
    assert loss["epoch"] == pytest.approx([step / STEPS for step in rows], rel=1e-6)
    assert curves["loss", True]["step"] == [4, 8, 12, 16]


def test_weights_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    killed, other = map(RunRecord, runs)
    found = weight_digests([killed, other])
    assert found.saved == (1, 15)
    names = {re.sub(r"_\d+", "", name) for name in found.differing}
    assert {"sequential/dense/kernel"} <= names
    page = report_page([killed, other], "1")
    assert f"after step 15: {len(found.differing)} of" in page
    assert "settings.seed" in Texts(page).cells
    train(tmp_path / "again")  # killed and resumed or not: the same weights
    same = weight_digests([killed, RunRecord(tmp_path / "again")])
    assert same.differing == []
    assert "arrays of weights are the same after step 15" in report_page(
        [killed, RunRecord(tmp_path / "again")], "1"
    )
    (tmp_path / "again" / "checkpoints" / "step-00000015" / "manifest.json").write_text("{}")
    assert "cannot be read" in weight_digests([killed, RunRecord(tmp_path / "again")]).problem


def test_weights_of_different_fits_are_not_compared(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    killed = RunRecord(runs[0])
    where = tmp_path / "second"
    shutil.copytree(runs[0] / "checkpoints", where / "checkpoints-2")
    second = record(where, {**START, "fit": 2, "checkpoints": str(where / "checkpoints-2")})
    assert "no checkpoint of the same step" in weight_digests([killed, second]).problem
    assert weight_digests([second, second]).when == "step 15 of fit 2"


def test_long_curves_are_thinned_out() -> None:
    """Each part keeps its extremes; nothing is invented."""
    count = 100_000
    rows = [log(step, loss=float(step % 1000)) for step in range(1, count + 1)]
    rows[54_321]["metrics"]["loss"] = 1e9
    rows[65_432]["metrics"]["loss"] = "nan"
    (curve,) = run_curves(rows)
    assert (curve.rows, len(curve.means or [])) == (count, PARTS)
    assert PARTS < len(curve.points) <= MOST_POINTS + 1
    values = {number: float(rows[number]["metrics"]["loss"]) for number, _ in curve.points}
    assert [values[n] for n, v in curve.points if v == v] == [v for _, v in curve.points if v == v]
    assert {0, count - 1, 54_321, 65_432} <= values.keys()
    part = range(count // PARTS)
    assert curve.means is not None
    assert curve.means[0][1] == sum(step % 1000 + 1 for step in part) / len(part)


def test_the_place_of_a_step_on_the_axes() -> None:
    rows = [log(2), log(4, event="epoch"), log(6, 2)]
    axes = row_axes(rows, None)
    assert axes.epochs == [0.5, 1.0, 2.0]  # of an epoch that has not ended, the last row
    assert row_axes(rows, 4).epochs == [0.5, 1.0, 1.5]
    assert row_axes(rows, 4).at(5) == (1.25, 2.5)
    assert row_axes(rows, 4).at(99) == (1.5, 3.0)
    assert row_axes([], None).at(1) is None
    resumed = [
        log(19, 3),
        log(21, 3),
        log(24, 3, event="epoch"),
        log(26, 4),
    ]  # at another's step 18
    assert row_axes(resumed, 8).epochs == [2.375, 2.625, 3.0, 3.25]
    assert row_axes(resumed[:2], 8).epochs == [2.375, 2.625]
    assert row_axes(resumed[:2], None).epochs[0] > 2.0  # no earlier epoch
    # A rollback to step 3, in the second batch of the second epoch.
    to_three = {"event": "rollback", "step": 3, "epoch": 1, "batch": 2}
    back = [log(2), log(4, event="epoch"), to_three]
    back += [log(4, 2), log(5, 2), log(5, 2, event="epoch")]
    assert row_axes(back, 4).epochs == [0.5, 1.0, 1.75, 2.0, 2.0]
    # Rows beyond the first epoch's last step; a row of the same epoch before the rollback.
    later = [*back[:3], log(5, 2), log(6, 2, event="epoch")]
    assert row_axes(later, 5).epochs == row_axes(later).epochs == [0.5, 1.0, 1.8, 2.0]
    to_six = {**to_three, "step": 6, "batch": 3}
    same = [*back[:2], log(5, 2), to_six, log(7, 2), log(9, 2, event="epoch")]
    assert row_axes(same).epochs == [0.5, 1.0, 1 + 1 / 6, 1 + 4 / 6, 2.0]


def test_shares_of_time_are_added_up(tmp_path: Path) -> None:
    def times(epoch: int, *ranks: dict[str, float]) -> dict[str, Any]:
        return {"event": "times", "epoch": epoch, "step": epoch, "ranks": list(ranks)}

    one = {"seconds": 10.0, "data": 2.0, "compute": 7.0}
    two = {"seconds": 4.0, "compute": 3.0, "waiting for rank 0": 1.0}
    run = record(tmp_path / "run", START, log(1), times(1, one, two), times(2, one))
    assert total_shares(time_shares(run)) == {
        "rank 0": {"data": 4.0, "compute": 14.0, "not attributed": 2.0},
        "rank 1": {"compute": 3.0, "waiting for rank 0": 1.0},
    }
    rows = page_data([run])["runs"][0]["times"]
    assert [row["label"] for row in rows] == ["all epochs", "epoch 1", "epoch 2"]
    assert "14 s (70.0%)" in Texts(report_page([run], "1")).cells


def test_shares_of_time_are_those_of_a_process_when_ranks_change(tmp_path: Path) -> None:
    """Of four, rank 1 is lost; then two changes of which the last is recorded; then one joins."""

    def times(step: int, *compute: float) -> dict[str, Any]:
        ranks = [{"seconds": 2 * s, "compute": s, "waiting for rank 1": s} for s in compute]
        return {"event": "times", "epoch": 1, "step": step, "ranks": ranks}

    def change(step: int, ranks: int, *lost: int) -> dict[str, Any]:
        return {"event": "ranks", "step": step, "epoch": 0, "lost": list(lost), "ranks": ranks}

    events = [{**START, "ranks": 4}, times(1, 1.0, 2.0, 3.0, 4.0), change(2, 3, 1)]
    run = record(tmp_path / "run", *events, times(3, 10.0, 20.0, 30.0))
    first, second = "waiting for rank 1", "waiting for rank 2"  # which is rank 1 by then
    assert total_shares(time_shares(run)) == {
        "rank 0": {"compute": 11.0, first: 1.0, second: 10.0},
        "rank 1": {"compute": 2.0, first: 2.0},
        "rank 2": {"compute": 23.0, first: 3.0, second: 20.0},
        "rank 3": {"compute": 34.0, first: 4.0, second: 30.0},
    }
    page = Texts(report_page([run], "1"))
    assert {"rank 3", second} <= set(page.cells)
    assert page_data([run])["runs"][0]["times"][0]["names"] == [f"rank {n}" for n in range(4)]
    again = record(tmp_path / "again", *events, change(4, 1, 0), times(5, 7.0))
    assert list(total_shares(time_shares(again)))[4:] == ["rank 0, after step 4"]
    more = record(tmp_path / "more", *events, change(6, 4), times(7, 1.0, 1.0, 1.0, 1.0))
    assert list(total_shares(time_shares(more)))[4:] == ["rank 3, joined after step 6"]


def test_marks_of_changed_ranks(tmp_path: Path) -> None:
    changes = {
        "rank 1 was lost after step 2; 3 continued": {"lost": [1], "joined": False},
        "ranks joined after step 2; 3 continued": {"lost": [], "joined": True},
        "no rank was lost after step 2; 3 continued": {"lost": [], "joined": False},
    }
    change = {"event": "ranks", "step": 2, "epoch": 0, "ranks": 3}
    events = [{**START, "ranks": 4}, *({**change, **each} for each in changes.values())]
    marks = run_marks(record(tmp_path / "run", *events))
    assert [mark.text for mark in marks if mark.kind == "ranks"] == list(changes)


def test_values_are_those_of_the_fit_that_all_runs_have(tmp_path: Path) -> None:
    """As the curves are: else those of different fits would stand side by side."""
    better = {"event": "metrics", "better": {"loss": "min"}}
    rows = [START, better, log(1, event="epoch", loss=0.5), log(2, 2, event="epoch", loss=0.75)]
    later = [{**START, "fit": 2}, {**log(1, event="epoch", loss=0.125), "fit": 2}]
    one = record(tmp_path / "one", *rows, *later)
    two = record(tmp_path / "two", *rows)
    cells = Texts(report_page([one, two], "1")).cells
    at = cells.index("one: last")
    assert cells[at - 1 : at + 9] == [
        "metric", "one: last", "one: best", "two: last", "two: best",
        "loss", "0.75", "0.5 (epoch 1)", "0.75", "0.5 (epoch 1)",
    ]  # fmt: skip
    cells = Texts(report_page([one], "1")).cells
    assert cells[cells.index("loss") + 1 :][:2] == ["0.125", "0.125 (epoch 1)"]


HEALS = """
import os, signal, time
from ktrainer import Callback, Trainer
from tests.small import build, data

class Acts(Callback):
    def on_step_begin(self, step):
        if self.world.stable_rank == 2:
            time.sleep(0.02)
        if self.world.stable_rank == 1 and step == 30:
            os.kill(os.getpid(), signal.SIGKILL)

with Trainer.from_cli([Acts()]) as trainer:
    trainer.fit(build, data(240))
"""


@pytest.mark.exhaustive
def test_waits_before_a_loss_are_not_waits_for_the_rank_of_that_number(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEALS)
    words = ("backend=data_parallel", "data.batch_size=4", "trainer.epochs=2", "run.dir=run")
    done = ktrainer("run", "-n", 3, "--heal", "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunRecord(tmp_path / "run")
    first = next(event for event in run.events if event["event"] == "times")
    waits = {share for share in first["ranks"][0] if share.startswith("waiting")}
    assert {"waiting before ranks changed", "waiting for rank 1"} <= waits
    assert "waiting for rank 2" not in waits
    assert first["ranks"][0]["waiting before ranks changed"] > 0.2
    shares = total_shares(time_shares(run))
    assert list(shares) == ["rank 0", "rank 2"]
    assert shares["rank 0"]["waiting for rank 2"] > 0.2


def test_times_of_several_runs_and_fits_are_of_the_same_epochs(
    tab: Browser, tmp_path: Path
) -> None:
    def times(fit: int, epoch: int, seconds: float) -> dict[str, Any]:
        ranks = [{"seconds": seconds, "compute": seconds}]
        return {"event": "times", "fit": fit, "epoch": epoch, "step": epoch, "ranks": ranks}

    start = {**START, "fit": 2}
    two = record(tmp_path / "two", START, times(1, 1, 1.0), times(1, 2, 2.0), start, times(2, 1, 4))
    one = record(tmp_path / "one", START, times(1, 1, 8.0))
    rows = [run["times"] for run in page_data([one, two])["runs"]]
    labels = ["all epochs", "fit 1, epoch 1", "fit 1, epoch 2", "fit 2, epoch 1"]
    assert [[row["label"] for row in each] for each in rows] == [labels, labels]
    assert [row["ranks"] for row in rows[0]] == [[{"compute": 8.0}], [{"compute": 8.0}], [], []]
    assert [row["ranks"][0]["compute"] for row in rows[1]] == [7.0, 1.0, 2.0, 4.0]
    page = tmp_path / "report.html"
    page.write_text(report_page([one, two], "1"))
    tab.open(page)
    choose = "s = document.querySelector('#times select'); s.selectedIndex = 2; "
    tab.evaluate(f"{{ let {choose} s.dispatchEvent(new Event('change')); }}")
    assert tab.errors == []
    assert "No times are recorded" in tab.evaluate("document.querySelector('#times').textContent")


def test_many_epochs_are_added_up(tmp_path: Path) -> None:
    def times(epoch: int) -> dict[str, Any]:
        return {"event": "times", "epoch": epoch, "step": 1, "ranks": [{"compute": 1.0}]}

    run = record(tmp_path / "run", START, *map(times, range(1, 102)))
    rows = page_data([run])["runs"][0]["times"]
    assert [row["label"] for row in rows[:2]] == ["all epochs", "epoch 1 to 2"]
    assert rows[-1]["label"] == "epoch 101"
    assert sum(row["ranks"][0]["compute"] for row in rows[1:]) == 101


def test_the_fit_that_all_runs_have_is_shown_first(tab: Browser, tmp_path: Path) -> None:
    one = record(tmp_path / "one", START, log(1), log(2))
    second = ({**START, "fit": 2}, {**log(1), "fit": 2})
    two = record(tmp_path / "two", START, log(1), log(2), *second)
    empty = record(tmp_path / "empty", START)
    assert page_data([one, two, empty])["fit"] == "1"
    assert page_data([two, empty])["fit"] == "2"
    assert page_data([empty])["fit"] == "1"
    page = tmp_path / "report.html"
    page.write_text(report_page([one, two], "1"))
    tab.open(page)
    assert tab.errors == []
    captions = tab.evaluate("document.querySelector('figcaption').textContent")
    assert "one: training" in captions
    assert "two: training" in captions


def test_many_marks_are_drawn_in_part(tmp_path: Path) -> None:
    slow = {"event": "slow", "cause": "data", "message": "slow"}
    run = record(tmp_path / "run", START, log(1), *({**slow, "step": k} for k in range(1, 202)))
    drawn = [mark for mark in page_data([run])["runs"][0]["marks"] if mark["kind"] == "slow"]
    assert len(drawn) == 67
    assert "Of more than 100 marks of a kind some are drawn" in report_page([run], "1")


def test_bars_are_as_long_as_the_shares(tab: Browser, tmp_path: Path) -> None:
    """Of each rank; small shares are one bar, as there are eight colours."""
    shares = {f"part {k}": float(k) for k in range(1, 11)}
    ranks = [{"seconds": 55.0, **shares}, {"seconds": 11.0, "part 10": 6.0, "part 9": 5.0}]
    event = {"event": "times", "epoch": 1, "step": 1, "ranks": ranks}
    page = tmp_path / "report.html"
    page.write_text(report_page([record(tmp_path / "run", START, log(1), event)], "1"))
    tab.open(page)
    assert tab.errors == []
    bars = "[...document.querySelectorAll('#times rect')]"
    widths = tab.evaluate(f"{bars}.map(bar => Number(bar.getAttribute('width')))")
    seconds = [10, 9, 8, 7, 6, 5, 4, 3 + 2 + 1, 6, 5]
    assert widths == pytest.approx([widths[0] * each / 10 for each in seconds])
    labels = "[...document.querySelectorAll('#times .keys > span')].map(key => key.textContent)"
    assert tab.evaluate(labels) == [*(f"part {k}" for k in range(10, 3, -1)), "others"]


def test_a_foreign_record_makes_a_page(tmp_path: Path, tab: Browser) -> None:
    """Fields of any type where they are missing or not what a run writes."""
    (tmp_path / "run").mkdir()
    odd: list[Any] = [None, True, -1, "x", [], {}, [1], {"a": [{"b": None}]}]
    odd += [1.7e308, 10**30, 10**400]
    lines = ['{"event": "log", "st', "[]", "7", "", "[" * 100_000]
    for value in odd:
        names = ("epochs", "steps_per_epoch", "host", "ranks", "versions", "code", "settings")
        names = (*names, "data", "model", "devices", "checkpoints", "resume", "restart", "elapsed")
        names = (*names, "why", "rank", "lost", "seconds", "metric", "cause", "epoch", "fit")
        more = dict.fromkeys(names, value)
        lines += [
            json.dumps({**more, **event})
            for event in (
                {"event": "start", "step": 0, "epoch": 0, "time": 5},
                {"event": "start", "step": 3, "epoch": 1, "time": 1e300, "fit": 1},
                {"event": "log", "step": 2, "epoch": 1, "metrics": {"loss": 1}, "fit": 1},
                {"event": "epoch", "step": 2, "epoch": -1, "metrics": {"loss": -1.7e308}, "fit": 1},
                {"event": "log", "step": 9, "epoch": 1, "metrics": {"loss": value}, "fit": 1},
                {"event": "ranks", "step": 2, "epoch": 1, "time": "now", "fit": 1},
                {"event": "times", "step": 2, "epoch": 1, "fit": 1, "ranks": [value, {"x": value}]},
                {"event": "slow", "step": 2, "cause": "c", "message": "m", "time": value, "fit": 1},
                {"event": "checkpoint", "step": 2, "path": "p", "time": 1e18, "fit": 1},
                {"event": "end", "reason": "x", "time": 10**30, "fit": 1},
            )
        ]
    (tmp_path / "run" / NAME).write_text("\n".join(lines))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(page)]) == 0
    tab.open(page)
    assert tab.errors == []
    assert main(["watch", str(tmp_path / "run")]) == 0  # it runs, on another host
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / NAME).touch()
    assert main(["report", str(tmp_path / "empty"), str(tmp_path / "run")]) == 0


# -- the command


def test_the_command(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = ktrainer("report", runs[0], "--png", tmp_path / "curves.png")
    page = runs[0] / "report.html"
    assert done.stdout == f"report: {page}\npicture: {tmp_path / 'curves.png'}\n", done.stderr
    assert page.stat().st_mode & 0o077 == 0
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", page.read_text())
    before = page.read_text()
    assert main(["report", str(runs[0]), "--output", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    nowhere = ("--png", tmp_path / "no" / "x.png", "--output", tmp_path / "x.html")
    refused = ktrainer("report", runs[0], *nowhere)
    assert "Name another place by --png FILE" in refused.stderr
    (tmp_path / "x.html").unlink()
    (tmp_path / "taken").mkdir()
    assert main(["report", str(runs[0]), "--output", str(tmp_path / "taken")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png", "taken"]
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert page.read_text() == before


def test_the_end_of_a_run_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a run", "logging.progress=plain")
    said = re.search(r"^  report +ktrainer (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said is not None
    assert main(shlex.split(said[1])) == 0
    assert (tmp_path / "a run" / "report.html").is_file()


def test_neither_command_needs_tensorflow_or_numpy(runs: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from ktrainer.cli.main import main; folder, page = sys.argv[1:]\n"
        "assert main(['report', folder, '--output', page]) == main(['watch', folder]) == 0\n"
        "assert not {'tensorflow', 'keras', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = python("-c", code, runs[0], tmp_path / "page.html", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr


def test_names_of_runs_tell_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "run"]
    found = [record(folder, START) for folder in folders]
    assert run_names(found[:1]) == ["run"]
    assert run_names(found[:2]) == ["a/run", "b/run"]
    assert run_names(found[1:]) == ["run (1)", "run (2)"]


# -- runs of several processes


@pytest.mark.exhaustive
def test_a_rank_that_is_lost(tmp_path: Path) -> None:
    """Of three, two continue."""
    words = ["run", "-n", 3, "--heal", SCRIPT, tmp_path / "run", 8]
    done = ktrainer(*words, "--", "backend=data_parallel", KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stdout + done.stderr
    check_lost_ranks(tmp_path / "run", "ranks")


def check_lost_ranks(folder: Path, kind: str) -> None:
    """What the page says of a run whose ranks healed, or were started again: `resume`."""
    run = RunRecord(folder)
    (mark,) = [mark for mark in run_marks(run) if mark.kind == kind]
    expected = {
        "resume": "continued after step 5 (restart 1) on 2 processes",
        "ranks": "rank 2 was lost after step 8; 2 continued in",
    }
    assert mark.text.startswith(expected[kind])
    assert mark.step == {"resume": 5, "ranks": 8}[kind]
    assert any(line.startswith(expected[kind]) for line in stood_out(run))
    failed = [mark.text for mark in run_marks(run) if mark.kind == "failed"]
    assert len(failed) == (kind == "resume")
    assert all("SIGKILL" in text for text in failed)
    kinds = [span.kind for span in run_spans(run)]
    assert kinds == {"resume": ["training"] * 2, "ranks": ["healing", "training"]}[kind]
    steps = [row["step"] for row in run.rows if row["event"] == "log"]
    assert steps == list(range(1, EPOCHS * STEPS + 1))
    report_page([run], "1")


@pytest.mark.exhaustive
def test_a_million_rows_make_a_small_page(tmp_path: Path, tab: Browser) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / NAME).open("w") as file:
        file.write(json.dumps({**START, "time": 1.0}) + "\n")
        row = json.dumps({**log(0), "time": 0.5}).replace('"epoch": 1', '"epoch": %d')
        row = row.replace('"step": 0', '"step": %d').replace("0.0", "%.1f").replace("0.5", "%.1f")
        for step in range(1, 1_000_001):
            file.write(row % (step, 1 + step // 10_000, step / 2, step, 1 + step) + "\n")
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(page)]) == 0
    assert page.stat().st_size < 1e6
    tab.open(page)
    assert tab.errors == []
    assert "Long curves are thinned out" in tab.evaluate("document.body.textContent")
