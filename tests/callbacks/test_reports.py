"""What is shown and written: screen, CSV, TensorBoard, throughput."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktrainer import distributed
from ktrainer.callbacks import (
    Callback,
    CSVLog,
    PlainProgress,
    RichProgress,
    TensorBoardLog,
    Throughput,
    emit,
)
from ktrainer.callbacks.console_text import (
    count_text,
    epochs_of,
    final_report,
    headline,
    metrics_text,
    rate_text,
    span_text,
)
from ktrainer.callbacks.throughput import Meter
from ktrainer.errors import ConfigError
from ktrainer.runs.live_record import LiveRecord
from ktrainer.state.progress import Progress
from ktrainer.state.train_state import TrainState
from tests import small
from tests.callbacks.helpers import data, fit, small_model


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_steps_and_epochs(tmp_path) -> None:
    path = tmp_path / "log.csv"
    x, y = data(20)
    fit(small_model(), [CSVLog(path, every="2ba")], epochs=2, validation_data=(x, y))
    table = rows(path)
    assert [(r["event"], r["epoch"], r["step"]) for r in table] == [
        ("log", "1", "2"),
        ("log", "1", "4"),
        ("epoch", "1", "5"),
        ("log", "2", "6"),
        ("log", "2", "8"),
        ("log", "2", "10"),
        ("epoch", "2", "10"),
    ]
    assert table[0]["val_loss"] == ""
    assert float(table[-1]["val_loss"]) > 0


def test_csv_drops_what_will_be_done_again(tmp_path) -> None:
    path = tmp_path / "log.csv"
    fit(small_model(), [CSVLog(path, every="1ba")], epochs=2)
    again = CSVLog(path, every="1ba")
    again.set_model(small_model())
    again.on_train_begin()
    again.on_restore(Progress(epoch=1, batch=2, step=7))
    again.on_log(8, {"loss": 1.0, "new": 2.0})
    table = rows(path)
    assert [r["step"] for r in table] == [*"12345", "5", "6", "7", "8"]
    assert table[-1]["new"] == "2.0"


def test_csv_drops_an_epoch_that_is_not_over(tmp_path) -> None:
    path = tmp_path / "log.csv"
    fit(small_model(), [CSVLog(path)], epochs=2)
    again = CSVLog(path)
    again.set_model(small_model())
    again.on_train_begin()
    again.on_restore(Progress(epoch=1, batch=5, step=10))  # its second epoch had been cut short
    assert [r["epoch"] for r in rows(path)] == ["1"]


def test_reports_need_a_place() -> None:
    for callback in (CSVLog(), TensorBoardLog()):
        with pytest.raises(ConfigError, match="give the"):
            fit(small_model(), [callback])


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    import tensorflow as tf

    found: dict[str, list[tuple[int, float]]] = {}
    for file in directory.glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name in ("scalars", "")
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_tensorboard_scalars(tmp_path) -> None:
    x, y = data(20)
    callback = TensorBoardLog(tmp_path, every="2ba")
    history = fit(small_model(), [callback], epochs=2, validation_data=(x, y)).history
    assert [step for step, _ in scalars(tmp_path / "train")["loss"]] == [2, 4, 6, 8, 10]
    for part, prefix in (("epoch", ""), ("validation", "val_")):
        expected = list(zip([5, 10], history[f"{prefix}loss"], strict=True))
        written = scalars(tmp_path / part)["loss"]
        assert [s for s, _ in written] == [s for s, _ in expected]
        assert [v for _, v in written] == pytest.approx([v for _, v in expected])


def test_plain_lines(capsys) -> None:
    x, y = data(20)
    callback = PlainProgress(every="2ba")
    fit(small_model(), [callback], epochs=2, validation_data=(x, y))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training sequential, 19 parameters, 1 process"
    assert re.match(r"epoch 1/2  step 2/5  loss \S+  mae \S+  \S+ steps/s  eta \S+$", lines[1])
    assert re.match(
        r"epoch 1/2  loss \S+  mae \S+  val_loss \S+  val_mae \S+  \[.*steps/s\]$", lines[3]
    )
    end = lines.index("training finished")
    assert [line.split()[0] for line in lines[end + 1 :] if line] == [
        *("epochs", "steps", "time", "epoch", "loss", "mae")
    ]
    assert re.match(r"  epoch 2  training  validation  best, epoch \d$", lines[-3])
    assert all(re.match(r"  (loss|mae)( +\d\S*){3}$", line) for line in lines[-2:])
    assert "\x1b" not in "".join(lines)


def test_closing_table() -> None:
    epochs = {
        0: {"loss": 0.5, "accuracy": 0.25, "val_accuracy": 0.75, "val_loss": 0.125},
        1: {"loss": 0.0123456, "accuracy": 0.5, "val_accuracy": 0.5, "val_loss": 1234.56},
    }
    facts = {"epochs": "2", "examples/s": "25.1k (fastest epoch)"}
    assert final_report(facts, epochs).splitlines() == [
        "training finished",
        "  epochs      2",
        "  examples/s  25.1k (fastest epoch)",
        "",
        "  epoch 2   training  validation  best, epoch 1",
        "  loss       0.01235        1235          0.125",
        "  accuracy       0.5         0.5           0.75",
    ]
    assert final_report(facts, {0: {"loss": 0.5, "rate": 1.0}}).splitlines()[4:] == [
        "  epoch 1  training",
        "  loss          0.5",
        "  rate            1",
    ]
    assert final_report(facts, {}).splitlines()[-1] == "  examples/s  25.1k (fastest epoch)"
    losses = {
        i: {"loss": 1.0, "val_loss": loss} for i, loss in enumerate([math.nan, 0.5, 0.25, math.nan])
    }
    assert final_report({}, losses).splitlines()[2:] == [
        "  epoch 4  training  validation  best, epoch 3",
        "  loss            1         nan           0.25",
    ]


def test_rich_display_on_a_launchers_terminal(monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setenv("KTRAINER_TERMINAL", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("ktrainer.callbacks.console.REFRESH_SECONDS", 0.0)  # draw every step
    x, y = data(20)
    callback = RichProgress()
    fit(small_model(), [callback], epochs=2, validation_data=(x, y))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for words in ("epoch 1/2", "5/5", "ETA", "steps/s", "validating", "val_mae", "best, epoch"):
        assert words in text
    assert "training finished" in text
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l"), "cursor"


@pytest.mark.filterwarnings("ignore:Your input ran out")
def test_rich_display_of_unknown_lengths(monkeypatch) -> None:
    import tensorflow as tf

    screen = io.StringIO()
    monkeypatch.setenv("KTRAINER_TERMINAL", "1")
    monkeypatch.setattr(sys, "stdout", screen)

    batches = tf.data.Dataset.from_tensor_slices(data(30)).batch(10).filter(lambda x, y: True)
    small_model().fit(batches, verbose=0, shuffle=False, callbacks=[RichProgress()])
    assert "3 steps" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_the_headline_names_differences() -> None:
    lines = ("unlike one process: this", "unlike Model.fit: that")
    text = headline(small_model(), distributed.SingleWorld(), None, lines)
    assert text.splitlines()[1:] == [f"  {line}" for line in lines]


def test_events_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a trainer, `on_log` and `on_validation_end` come from the loop alone."""
    trainer = SimpleNamespace(
        world=distributed.SingleWorld(),
        state=TrainState(
            progress=Progress(epoch=0, batch=2, step=2, examples=64), steps_per_epoch=4
        ),
        config=SimpleNamespace(trainer=SimpleNamespace(max_steps=3), backend=None),
    )
    clock = SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr("ktrainer.callbacks.throughput.time", clock)
    callback = PlainProgress()
    callback.set_params({"epochs": 2})
    callback.set_model(small_model())
    callback.set_trainer(trainer)
    callback.on_train_begin()
    said: list[str] = []
    callback._print = said.append  # type: ignore[method-assign]
    callback.meter._marks[0] = (99.0, 0, 0, 0.0)
    emit([callback], "on_log", 2, {"loss": 0.5})
    emit([callback], "on_validation_end", 2, {"val_loss": 0.25})
    assert re.match(r"epoch 1/2  step 2/4  loss 0.5  2 steps/s  64 examples/s  eta 0\.", said[0])
    assert said[1] == "epoch 1/2  step 2  val_loss 0.25"


def _only_rank_zero_reports(directory: str) -> list[str]:
    import contextlib

    here, out = Path(directory), io.StringIO()
    with contextlib.redirect_stdout(out):
        fit(
            small_model(),
            [
                PlainProgress(every="2ba"),
                RichProgress(),
                CSVLog(here / f"{distributed.current_world().rank}.csv"),
                TensorBoardLog(here / f"tb{distributed.current_world().rank}"),
                throughput := Throughput(),
            ],
        )
    assert len(throughput.epochs) == 1
    return out.getvalue().splitlines()


def test_only_rank_zero_reports(ranks, tmp_path) -> None:
    root, other = ranks(2).run(_only_rank_zero_reports, str(tmp_path))
    assert root
    assert other == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.csv", "tb0"]


def _throughput(directory: str) -> list[Any]:
    here = distributed.current_world()
    trainer = SimpleNamespace(
        world=here,
        state=TrainState(steps_per_epoch=5),
        run_dir=Path(directory),
        backend=SimpleNamespace(communication_seconds=5.0),
    )
    seconds = trainer.state.times.seconds
    seconds |= {"data": 1.0, "communication": 5.0}
    callback = Throughput()
    callback.set_trainer(trainer)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    trainer.state.progress.advance(320)
    seconds["data"] += here.rank + 1
    seconds["communication"] += 10 * (here.rank + 1)
    callback.on_epoch_end(0)
    return callback.epochs


def test_throughput_of_every_rank(ranks, tmp_path) -> None:
    first, second = ranks(2).run(_throughput, str(tmp_path))
    assert first == second
    (epoch,) = first
    assert (epoch.steps, epoch.examples) == (1, 320)
    assert epoch.examples_per_second == pytest.approx(320 / epoch.seconds)
    assert epoch.data_wait == [1, 2]
    assert epoch.communication_wait == [10, 20]
    (line,) = (tmp_path / "throughput.jsonl").read_text().splitlines()
    assert json.loads(line)["communication_wait"] == [10, 20]


def test_throughput_of_an_epoch_is_written_once(tmp_path) -> None:
    trainer = SimpleNamespace(
        world=distributed.SingleWorld(),
        state=TrainState(steps_per_epoch=1),
        run_dir=tmp_path,
        backend=SimpleNamespace(communication_seconds=0.0),
    )
    path = tmp_path / "throughput.jsonl"

    def run(epochs: range, restored: Progress | None = None) -> list[int]:
        callback = Throughput()
        callback.set_trainer(trainer)
        callback.on_train_begin()
        if restored is not None:
            callback.on_restore(restored)
        for epoch in epochs:
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch)
        return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]

    assert run(range(3)) == [0, 1, 2]
    path.write_text(path.read_text() + '{"epoch": 3, "sec')  # killed while it wrote
    assert run(range(2, 4), Progress(epoch=2, batch=1)) == [0, 1, 2, 3]
    assert run(range(1)) == [0], "a fresh run starts a fresh file"


def test_numbers_for_people() -> None:
    assert [span_text(s) for s in (0.81, 59.6, 185, 7620)] == ["0.8s", "1m 00s", "3m 05s", "2h 07m"]
    assert [count_text(v) for v in (0, 0.5, 832, 25100, 2.9e6, 3e9)] == [
        *("0", "0.5", "832", "25.1k", "2.9M", "3.0G"),
    ]
    assert rate_text((12.0, None)) == "12 steps/s"
    assert metrics_text({"val_loss": 1, "auc": 0.5, "loss": 2}) == "loss 2  auc 0.5  val_loss 1"


def test_meter_forgets_pauses() -> None:
    meter, progress = Meter(), Progress()
    assert meter.rates == (None, None)
    meter.reset(progress)
    progress.advance(32)
    meter.update(progress)
    before = meter.rates
    assert before[0] is not None
    meter.reset(progress)
    assert meter.rates == before  # until there is something newer


class Judged(Callback):
    """Gives epochs losses of validation."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        logs["val_loss"] = (0.5, 0.1, 0.6, 0.4)[epoch]


def test_the_table_of_a_resumed_run(tmp_path, capsys) -> None:
    def table(epochs: int, **arguments: Any) -> list[str]:
        words = {"logging__progress": "plain", "run__dir": tmp_path, "checkpoint__every": "1ep"}
        with small.trainer([Judged()], checkpoint__resume="auto", **words) as it:
            it.fit(small.build, small.data(), epochs=epochs, **arguments)
            elapsed.append(it.progress.elapsed)
        _, _, said = capsys.readouterr().out.partition("training finished\n")
        return said.splitlines()

    elapsed: list[float] = []
    assert "best, epoch 2" in table(2)[-3]
    began = time.perf_counter()
    said = table(4)
    here = time.perf_counter() - began
    assert re.match(r" *epoch 4 +training +validation +best, epoch 2$", said[-3])
    assert said[-2].split()[-2:] == ["0.4", "0.1"]
    facts = dict(line.split(maxsplit=1) for line in said[: said.index("")])
    assert (facts["steps"], facts["examples"]) == ("24", "96")
    assert facts["examples/s"].endswith(" (fastest epoch, since the resume)")
    seconds = float(facts["time"].removesuffix("s"))
    assert elapsed[1] - 0.1 <= seconds <= elapsed[0] + here + 0.1


def test_the_table_where_training_began_later(tmp_path, capsys) -> None:
    words = {"logging__progress": "plain", "run__dir": tmp_path, "checkpoint__every": "1ep"}
    with small.trainer(**words) as it:
        it.fit(small.build, small.data(), initial_epoch=1, epochs=2)
    said = capsys.readouterr().out
    assert re.search(r"steps +12 \(began at 6\)\n", said)
    assert re.search(r"examples +24\n", said)
    with small.trainer(checkpoint__resume="auto", **words) as it:
        it.fit(small.build, small.data(), initial_epoch=2, epochs=3)  # the resume is there already
    assert re.search(r"steps +18\n", capsys.readouterr().out)


@pytest.mark.parametrize("event", ["on_restore", "on_heal"])
def test_the_table_of_a_display_that_takes_over(event, capsys, monkeypatch) -> None:
    """After a resume, however long that took, or where it is that of a new first rank."""
    display, clock = PlainProgress(), SimpleNamespace(now=100.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("ktrainer.callbacks.console.time", clock)
    progress = Progress(epoch=1, batch=3, step=9, examples=36, elapsed=2.0)
    state = TrainState(progress=progress)
    display.set_trainer(SimpleNamespace(state=state, world=distributed.SingleWorld()))
    history = SimpleNamespace(epoch=[0], history={"loss": [0.5], "val_loss": [0.25]})
    display.set_model(SimpleNamespace(history=history, name="m", trainable_variables=[]))
    monkeypatch.setattr(display, "_files", dict)
    display.on_train_begin()
    clock.now += 8
    getattr(display, event)(progress)
    display.on_epoch_begin(1)
    clock.now += 3
    history.history["val_loss"] = []  # as after an epoch that was not validated
    display.on_epoch_end(1, {"loss": 0.25})
    display.on_restore(progress)  # a rollback
    display.on_epoch_end(2, {"loss": 0.125, "val_loss": 0.75})
    capsys.readouterr()
    display.on_train_end()
    said = capsys.readouterr().out
    assert re.search(r"steps +9\n", said)
    assert re.search(r"time +5.0s\n", said)
    assert "best, epoch 1" in said
    assert display._resumed is (event == "on_restore")


def test_epochs_of_a_history_that_not_all_were_validated_in() -> None:
    history = SimpleNamespace(epoch=[0, 1], history={"loss": [0.5, 0.25], "val_loss": [0.75]})
    epochs, judged = epochs_of(history)
    assert (epochs, judged) == ({0: {"loss": 0.5}, 1: {"loss": 0.25}}, False)
    epochs |= {2: {"loss": 0.125, "val_loss": 1.0}}
    assert "best" not in final_report({}, epochs, judged=judged)


class GoesBack(Callback):
    """Asks for a rollback once, after `step` updates, and where given, more than `after` events."""

    def __init__(self, step: int, after: int = 0) -> None:
        super().__init__()
        self.step, self.after, self.heard = step, after, 0

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.heard += 1
        if step == self.step and self.heard > self.after:
            self.step = 0
            self.trainer.request_rollback("of a test")


def test_back_over_the_end_of_an_epoch(tmp_path, capsys) -> None:
    """From step 9 to step 5: the epoch that ended at step 6 stands, with its validation."""
    words = {"logging__csv": True, "logging__tensorboard": True, "logging__progress": "plain"}
    words |= {"logging__every": "1ba", "run__dir": tmp_path, "checkpoint__every": "5ba"}
    words |= {"trainer__validate_every": "2ba", "trainer__epochs": 2}
    with (
        small.trainer([GoesBack(9)], **words) as it,
        pytest.warns(UserWarning, match="back to the checkpoint of step 5"),
    ):
        it.fit(small.build, small.data(), validation_data=small.data())
    assert it.progress.step == 8
    ends = [row for row in rows(tmp_path / "metrics.csv") if row["event"] == "epoch"]
    assert [row["step"] for row in ends] == ["6", "8"]
    for part, name in (("epoch", "loss"), ("validation", "val_loss")):
        shown = scalars(tmp_path / "tensorboard" / part)["loss"]
        for row in ends:
            assert (int(row["step"]), pytest.approx(float(row[name]))) in shown
    validated = [step for step, _ in scalars(tmp_path / "tensorboard" / "validation")["loss"]]
    assert sorted(validated) == [2, 4, 6, 6, 8]  # step 8 of before is dropped
    said = capsys.readouterr().out
    assert not re.search(r"-\d\S* (steps|examples)/s|eta -", said)
    assert LiveRecord(tmp_path).steps == it.progress.step


def test_back_over_the_end_of_an_epoch_twice(tmp_path) -> None:
    """From step 9 to 5, and from 7 to 5: of step 6 stand the end of the first epoch, and what was
    trained last."""
    words = {"logging__csv": True, "logging__tensorboard": True, "run__dir": tmp_path}
    words |= {"checkpoint__every": "5ba", "trainer__validate_every": "2ba", "trainer__epochs": 2}
    back = [GoesBack(9), GoesBack(7, after=9)]
    with (
        small.trainer(back, **words) as it,
        pytest.warns(UserWarning, match="back to the checkpoint of step 5"),
    ):
        it.fit(small.build, small.data(), validation_data=small.data())
    assert it.progress.step == 6
    ends = [row for row in rows(tmp_path / "metrics.csv") if row["event"] == "epoch"]
    shown = scalars(tmp_path / "tensorboard" / "validation")["loss"]
    assert [step for step, _ in sorted(shown)] == [2, 4, 6, 6]
    expected = sorted(float(row["val_loss"]) for row in ends)
    assert sorted(value for step, value in shown if step == 6) == pytest.approx(expected)


class Fails(Callback):
    """Fails at a step of the second `fit`."""

    def on_step_end(self, step: int, logs: Any = None) -> None:
        if self.train_state.fits == 2 and step == 9:
            raise ZeroDivisionError


def test_csv_of_ones_own_over_two_fits(tmp_path) -> None:
    """A restart inside the second one leaves the rows of the first."""

    def run(*more: Callback) -> None:
        own = CSVLog(tmp_path / "own.csv")
        words = {"run__dir": tmp_path, "checkpoint__every": "1ep", "checkpoint__resume": "auto"}
        with small.trainer([own, *more], **words) as it:
            model = small.build()
            for epochs in (3, 2):
                it.fit(model, small.data(), epochs=epochs)

    with pytest.raises(ZeroDivisionError):
        run(Fails())
    run()
    steps = {
        name: [row["step"] for row in rows(tmp_path / name) if row["event"] == "epoch"]
        for name in ("own.csv", "own-2.csv")
    }
    assert steps == {"own.csv": ["6", "12", "18"], "own-2.csv": ["6", "12"]}


def test_csv_of_one_fit_keeps_its_name(tmp_path) -> None:
    again = CSVLog(tmp_path / "again.tsv")
    given = [CSVLog(tmp_path / "first.csv"), again, again]
    with small.trainer(run__dir=tmp_path / "run", trainer__epochs=1) as it:
        model = small.build()
        for each in given:
            it.fit(model, small.data(), callbacks=[each])
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["again-2.tsv", "again.tsv", "first.csv"]
