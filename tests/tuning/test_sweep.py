"""`ktrainer sweep`: real scripts, killed and started again."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ktrainer.cli import main
from ktrainer.cli.sweep_command import _open_study, add_arguments, read_later_options
from ktrainer.cli.sweep_runs import OUTPUT, Outcome, outcome
from ktrainer.cli.sweep_words import SweepWords
from ktrainer.errors import ConfigError
from ktrainer.launch.process_tree import is_alive
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import NAME, append
from ktrainer.tuning.search_space import read_space
from ktrainer.tuning.sweep_study import SECRET, SweepStudy, storage_in
from ktrainer.tuning.sweep_trial import PRUNED
from tests.processes import Done, ktrainer, warm_python
from tests.runs.browser import browser, why_no_browser

pytestmark = pytest.mark.filterwarnings("ignore:unclosed database")  # SQLAlchemy's, at the end

SCRIPT = """
import os, signal, time
from pathlib import Path
import keras, numpy as np, psutil
from ktrainer import Callback, Trainer


class Acts(Callback):
    def on_step_end(self, step, logs=None):
        if user.raises:
            raise RuntimeError("planted")
        hold = Path(__file__).with_name(f"hold {Path(trainer.run_dir).name} {step}")
        if hold.exists():
            self.wait(hold)

    def wait(self, hold):
        asked, before = [], signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: asked.append(before(*given)))
        hold.with_name(f"held {os.getpid()}").touch()
        while hold.exists() and not asked:
            time.sleep(0.02)
        signal.signal(signal.SIGTERM, before)

    def on_train_end(self, logs=None):
        killed = Path(trainer.run_dir) / "killed"
        if user.kills and self.train_state.stop_reason and not killed.exists():
            killed.touch()
            words = {"sweep", str(Path(trainer.run_dir).parent)}
            of = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
            next(p for p, line in of.items() if words <= {*line}).kill()
            time.sleep(60)
        note = Path(trainer.run_dir) / f"rank-{self.world.rank}.txt"
        note.write_text(f"{self.progress.step}")

    def max_updates_per_call(self):
        return 1


user = {"lr": 0.01, "width": 4, "raises": False, "kills": False}
trainer = Trainer.from_cli([Acts()], defaults={"user": user, "seed": 1})
user = trainer.config.user
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(128, 5)).astype("float32")
model = keras.Sequential([keras.layers.Dense(user.width, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(user.lr), "mse", metrics=["mae"])
trainer.fit(model, x, x.sum(axis=1), validation_split=0.25, epochs=4)
print("the script has ended")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def trials(folder: Path) -> list[Any]:
    import optuna

    return optuna.load_study(study_name="sweep", storage=storage_in(folder)).trials


def facts(folder: Path) -> list[tuple[Any, ...]]:
    """All that a sweep has found, to the last bit."""
    return [
        (t.number, t.state, t.params, t.value, t.intermediate_values, t.user_attrs)
        for t in trials(folder)
    ]


def sweep(folder: Path, *words: object, **env: str) -> Done:
    command = ("sweep", "--dir", folder / "sweep", *words)
    return ktrainer(*command, cwd=folder, seconds=280, OMP_NUM_THREADS="1", **env)


def test_trials_of_a_script(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    options = ["--sampler", "grid", str(script)]
    words = [*options, "user.lr=0.001,0.05", "trainer.epochs=2"]
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    best = [RunRecord(folder / f"trial-000{k}").best["val_loss"].value for k in (0, 1)]
    found = trials(folder)
    assert [trial.value for trial in found] == best
    assert {trial.params["user.lr"] for trial in found} == {"0.001", "0.05"}
    assert all(list(trial.intermediate_values) == [1, 2] for trial in found)
    command = f"train with the best: ktrainer run --ranks=1 {script} trainer.epochs=2 user.lr=0.05"
    assert command in said
    assert (folder / "sweep.html").exists()
    listed = ktrainer("runs", tmp_path).stdout
    assert "the best of 2 trials: trial-000" in listed
    assert command in listed
    runs = json.loads(ktrainer("runs", "--json", tmp_path).stdout)
    assert len(runs) == 2
    ((winner, told),) = [(r["run"], r["best_of_sweep"]) for r in runs if r["best_of_sweep"]]
    assert told == {
        "run": Path(winner).name,
        "metric": "val_loss",
        "value": RunRecord(Path(winner)).best["val_loss"].value,
        "trials": 2,
        "command": command.removeprefix("train with the best: "),
    }
    assert told["value"] == min(best)
    # Nothing is left to do, and another sweep is not mixed in.
    before = facts(folder)
    again = sweep(tmp_path, *words)
    assert (again.returncode, again.stdout.splitlines()) == (0, said.splitlines()[4:])
    other = sweep(tmp_path, *options, "user.lr=0.001,0.01")
    assert other.returncode == 2
    assert "begun with another words" in other.stderr
    other = sweep(tmp_path, "-n", 2, *words)
    assert other.returncode == 2
    assert "begun with another number of processes: 1, not 2" in other.stderr
    assert facts(folder) == before
    with script.open("a") as file:
        file.write("pass\n")
    changed = sweep(tmp_path, *words)
    assert changed.returncode == 0, changed.stderr
    assert "train.py has changed since this sweep began" in changed.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py", "user.lr=1,2"], "there is no script 'missing.py'"),
        (["train.py", "user.lr=1"], "no key has several values to try: write key=a,b,c"),
        (["train.py", "user.lr=log(0,1)"], "user.lr: log(0,1) needs ends above 0"),
        (["train.py", "trainer.epoch=3,5"], "Did you mean 'trainer.epochs'?"),
        (["train.py", "trainer.epochs=3,many"], "trainer.epochs: expected"),
        (["train.py", "trainer.epochs=uniform(1,2)"], "trainer.epochs: expected"),
        (["train.py", "user.lr=1,2", "trainer.epochs=no"], "trainer.epochs: expected"),
        (["train.py", "user.lr=1,2", "trainer.fast_dev_run=true"], "keeps no record of a run"),
        (["train.py", "run.dir=a,b"], "run.dir: is the sweep's"),
        (["train.py", "user.lr=1,2", "checkpoint.dir=x"], "checkpoint.dir: is the sweep's"),
        (["--sampler", "grid", "train.py", "user.lr=log(1,2)"], "tries every value"),
        (["--metric", "val_f1", "train.py", "user.lr=1,2"], "add --mode min or --mode max"),
        (["-n", "2", "train.py", "user.lr=1,2", "backend=local"], "backend"),
        (["train.py", "user.lr=1,2", "--sampler", "grit"], "invalid choice: 'grit'"),
        (["train.py", "user.lr=log(1,2)", "--sampler=grid"], "tries every value"),
        (["--sampler", "grid", "train.py", "user.k=int(1,20000)"], "there are 20,000, more than"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    script: Path, tmp_path: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(script) if word == "train.py" else word for word in words]
    try:
        status = main.main(["sweep", "--dir", str(tmp_path / "sweep"), *words])
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    assert said in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


def test_options_may_follow_the_script() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--seed=1", "train.py", "user.lr=1,2", "--trials", "5", "x", "--data", "d", "-n", "2"]
    args = parser.parse_args([*words, "--config=c.yaml", "--", "--trials", "7"])
    read_later_options(args)
    assert (args.seed, args.trials, args.ranks, args.sampler) == (1, 5, 2, "tpe")
    rest = ["x", "--data", "d", "--config=c.yaml", "--", "--trials", "7"]
    assert args.args == ["user.lr=1,2", *rest]


@pytest.mark.parametrize(
    ("words", "sampler", "trials", "said"),
    [
        (["user.a=1,2", "user.k=int(1,3)"], "grid", 4, "4 of 6 combinations are tried: --trials 6"),
        (["user.a=1,2", "user.k=int(1,3)"], "grid", 6, ""),
        (["user.a=1,2"], "tpe", 20, "there are 2 combinations for 20 trials, so some are tried a"),
        (["user.a=1,2"], "tpe", 2, ""),
        (["user.a=1,2", "user.k=log(1,3)"], "tpe", 20, ""),
    ],
)
def test_what_so_many_trials_mean(words: list[str], sampler: str, trials: int, said: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    hint = SweepWords.read(parser.parse_args(["train.py", *words])).hint(sampler, trials)
    assert hint.startswith(said)
    assert bool(hint) == bool(said)


def test_words_that_are_shown() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def read(*given: str) -> SweepWords:
        return SweepWords.read(parser.parse_args(["train.py", *given]))

    words = ["user.key_dim=16,32", "user.token_rate=log(1e-3,1)", "user.max_token=[8,9]"]
    one, other = (read(*words, f"user.api_key={key}", "--auth=x") for key in ("abc", "def"))
    shown = ["user.api_key=***", "user.max_token=[8,9]", "user.key_dim=16,32"]
    shown += ["user.token_rate=log(0.001,1.0)", "--auth=***"]
    assert one.redacted() == other.redacted() == shown
    assert one.digest() == read(*words, "user.api_key=abc", "--auth=x").digest() != other.digest()
    assert "user.key_dim=32 " in one.command({"user.key_dim": "32", "user.token_rate": 0.1})
    assert read("user.key=a,5").redacted() == ["user.key=***,5"]
    secret = ["user.token.pin=8", "user.token.password=8", "--password=08151234", "--key=4"]
    shown = ["user.token.password=***", "user.token.pin=8", "user.a=1,2"]
    assert read("user.a=1,2", *secret).redacted() == [*shown, "--password=***", "--key=4"]


def test_a_sweep_with_another_secret_is_another_one(script: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def begin(key: str, ranks: int = 1) -> SweepStudy:
        words = [f"-n{ranks}", str(script), "user.lr=1,2", f"user.api_key={key}"]
        args = parser.parse_args(words)
        return _open_study(args, SweepWords.read(args), tmp_path, "min")

    study = begin("abc")
    begin("abc")
    with pytest.raises(ConfigError, match=r"begun with another secret among the words\. Its"):
        begin("def")
    # As an earlier version began it.
    known = study._study.user_attrs["settings"]
    fewer = {name: known[name] for name in known if name not in (SECRET, "number of processes")}
    study._study.set_user_attr("settings", fewer)
    begin("abc")
    with pytest.raises(ConfigError, match="another number of processes: 1, not 2"):
        begin("abc", 2)


def record(
    folder: Path,
    *rows: dict[str, float],
    why: str = "",
    reason: str | None = "finished",
    **facts: Any,
) -> Path:
    folder.mkdir()
    start = {"step": 0, "epoch": 0, "ranks": 1, "epochs": 9, "settings": {}, **facts}
    start["host"] = socket.gethostname()
    append(folder / NAME, "start", **start)
    for step, row in enumerate(rows, 1):
        append(folder / NAME, "epoch", step=step, epoch=step, elapsed=1.0, metrics=row)
    if reason is not None:
        append(folder / NAME, "end", reason=reason, **({"why": why} if why else {}))
    return folder


def test_what_came_of_a_run(tmp_path: Path) -> None:
    rows = [{"loss": 3.0, "val_loss": 2.0}, {"loss": 2.0, "val_loss": 1.0}, {"loss": 1.0}]
    one = record(tmp_path / "one", *rows, {"loss": 0.5, "val_loss": 1.5})
    assert outcome(one, 0, None, "min") == Outcome("finished", 1.0, "val_loss", 4)
    assert outcome(one, 0, "loss", "min") == Outcome("finished", 0.5, "loss", 4)
    assert outcome(one, 0, "val_loss", "max").value == 2.0
    assert outcome(one, 0, "val_f1", "max").why == "its record has no val_f1"
    two = record(tmp_path / "two", {"loss": 2.0}, why=f"stopped because {PRUNED}")
    assert outcome(two, 0, None, "min") == Outcome("pruned", 2.0, "loss", 1)
    three = record(tmp_path / "three", {"loss": 2.0}, {"loss": math.nan})
    assert outcome(three, 0, None, "min").why == "loss is nan"
    # Trials are compared by one metric: a training loss is not ranked among validation losses.
    early = record(tmp_path / "early", {"loss": 0.1}, validates=True)
    assert outcome(early, 0, None, "min").why.startswith("it ended before its first validation")
    assert outcome(early, 0, "loss", "min") == Outcome("finished", 0.1, "loss", 1)
    own = record(tmp_path / "own", {"loss": 0.1, "val_mae": 0.2}, validates=True)
    assert outcome(own, 0, None, "min").metric == "loss"  # no trial has a validation loss
    # Scripts that catch the error of their fit, or end in the middle of it.
    five = record(tmp_path / "five", {"loss": 2.0}, why="OSError: full", reason="failed")
    assert outcome(five, 0, None, "min") == Outcome("failed", epochs=1, why="OSError: full")
    six = record(tmp_path / "six", {"loss": 2.0}, reason=None)
    assert outcome(six, 0, None, "min").why == "killed: its process has ended without a word"
    seven = record(tmp_path / "seven", {"loss": 2.0}, why="left", reason="interrupted")
    assert outcome(seven, 0, None, "min") == Outcome("finished", 2.0, "loss", 1)  # by `break`
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / OUTPUT).write_text("text\nImportError: no module\n\n")
    assert outcome(tmp_path / "four", 1, None, "min").why == "ImportError: no module"
    assert "trained nothing" in outcome(tmp_path / "four", 0, None, "min").why


@pytest.mark.exhaustive
def test_a_first_trial_that_no_other_can_follow_ends_the_sweep(
    script: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(SCRIPT.replace("Trainer.from_cli([Acts()], defaults={", "Trainer({"))
    plain.write_text(plain.read_text().replace('"seed": 1})', '"seed": 1}, [Acts()])'))
    (tmp_path / "two.py").write_text(
        f"{SCRIPT}\nTrainer.from_cli(defaults={{'user': {{'lr': 1.0}}}})"
    )
    for words, said in (
        (["two.py", "user.lr=0.1,0.2"], "the script makes a second Trainer, and a trial has one"),
        (["train.py", "user.rate=1,2"], "user.rate: the script has no parameter of this name"),
        (["plain.py", "user.lr=1,2"], "user.lr has no effect: the script makes its Trainer"),
        (["--metric", "accuracy", "train.py", "user.lr=0.1,0.2"], "no metric 'accuracy', as"),
    ):
        done = sweep(tmp_path, *words)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
        assert "the sweep ends" in done.stdout
    # What was refused leaves nothing that the right words would continue.
    done = sweep(tmp_path, "--trials", 1, "train.py", "user.lr=0.001,0.05")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_a_failed_trial_does_not_end_the_sweep(script: Path, tmp_path: Path) -> None:
    words = ["train.py", "user.raises=true,false", "user.lr=1e9,0.01", "trainer.epochs=2"]
    done = sweep(tmp_path, "--sampler", "grid", "--metric", "val_mae", "--mode", "min", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(tmp_path / "sweep")
    states = {tuple(t.params.values()): (t.state.name, t.user_attrs) for t in found}
    assert states["false", "0.01"][0] == "COMPLETE"
    for rate in ("1e9", "0.01"):
        state, known = states["true", rate]
        assert (state, "RuntimeError: planted" in known["why"]) == ("FAIL", True)
    state, known = states["false", "1e9"]
    assert state == "FAIL"
    assert re.search(r"(loss|val_mae) is (nan|inf)", known["why"])
    command = re.search(r"train with the best: ktrainer (.*)", done.stdout)
    assert command is not None
    run = ktrainer(*shlex.split(command[1]), "run.dir=again", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    best = min(t.value for t in found if t.value is not None)
    assert RunRecord(tmp_path / "again").best["val_mae"].value == best


@pytest.mark.exhaustive
def test_all_ranks_stop_a_pruned_trial_at_one_step(script: Path, tmp_path: Path) -> None:
    words = ("train.py", "user.lr=0.0001,0.05,0.0002", "backend=data_parallel")
    done = sweep(tmp_path, "-n", 2, "--sampler", "grid", "--pruner", "halving", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(tmp_path / "sweep")
    assert [t.state.name for t in found] == ["COMPLETE", "COMPLETE", "PRUNED"]
    steps = RunRecord(tmp_path / "sweep/trial-0000").starts[0]["steps_per_epoch"]
    for number, epochs in enumerate((4, 4, 1)):
        folder = tmp_path / f"sweep/trial-000{number}"
        ended = [(folder / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
        assert ended == [str(epochs * steps)] * 2
        assert RunRecord(folder).state[0] == "finished"
        said = (folder / "output.txt").read_text()
        assert ("the script has ended" in said) == (number < 2)  # a pruned one ends after fit
    assert found[2].value == RunRecord(folder).best["val_loss"].value


@pytest.mark.exhaustive
def test_a_sweep_that_is_killed_when_it_has_pruned(script: Path, tmp_path: Path) -> None:
    words = ("--sampler", "grid", "--pruner", "halving", "train.py", "user.kills=true",
             "user.lr=0.0001,0.05,0.0002", "checkpoint.every=1ep",
             "checkpoint.asynchronous=false")  # fmt: skip
    assert sweep(tmp_path, *words).returncode == -signal.SIGKILL  # by the trial
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(tmp_path / "sweep")
    assert [t.state.name for t in found] == ["COMPLETE", "COMPLETE", "PRUNED"]
    folder = tmp_path / "sweep" / "trial-0002"
    assert (folder / "killed").exists()
    assert list(found[2].intermediate_values) == [1]
    assert "the script has ended" not in (folder / OUTPUT).read_text()


KILLED = ("--trials", "2", "train.py", "user.lr=log(1e-3,1e-1)", "user.width=int(2,6)",
          "checkpoint.every=1ep", "checkpoint.asynchronous=false")  # fmt: skip


def start(folder: Path) -> subprocess.Popen[str]:
    command = [warm_python(), "-m", "ktrainer.cli.main", "sweep", "--dir", str(folder), *KILLED]
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder.parent, stdout=out, stderr=out, text=True)


def held(process: subprocess.Popen[str], folder: Path) -> psutil.Process:
    """The process of the next trial of a sweep that waits as `folder` has it."""
    while process.poll() is None:
        for path in folder.glob("held *"):
            path.unlink()
            return psutil.Process(int(path.name.split()[1]))
        time.sleep(0.02)
    raise AssertionError(process.communicate())


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on_as_if_it_had_not_been(
    script: Path, tmp_path: Path, within: Callable[..., None]
) -> None:
    undisturbed, killed = tmp_path / "one", tmp_path / "two"
    process = start(undisturbed)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    # The sweep itself, before the first checkpoint of a trial and after the second one of the
    # next; then a rank alone, which the sweep starts again; then a signal.
    for hold in (tmp_path / "hold trial-0000 1", tmp_path / "hold trial-0001 7"):
        hold.touch()
        process = start(killed)
        rank = held(process, tmp_path)
        process.kill()
        process.communicate()
        within(30, lambda rank=rank: not is_alive(rank), "the end of the trial's process")
        hold.unlink()
    hold.touch()
    process = start(killed)
    held(process, tmp_path).kill()
    held(process, tmp_path)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert "trial 1: killed" in out
    assert "the same command again continues" in out
    hold.unlink()
    process = start(killed)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    assert facts(killed) == facts(undisturbed)
    starts = [[r["step"] for r in RunRecord(killed / f"trial-000{k}").starts] for k in (0, 1)]
    assert starts == [[0, 0], [0, 6, 6, 7]]  # from checkpoints


@pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    from ktrainer.runs.sweep_page import TrialRow, sweep_page

    hostile = "</script><img src=x onerror=\"document.title='owned'\">"
    words = ("user.lr=log(1e-4,1e-1)", "user.k=int(1,9)", f"user.c='{hostile}',b,c")
    spaces = [space for word in words if (space := read_space(word)) is not None]
    tried: list[dict[str, Any]] = [
        {"user.lr": 10 ** (-1 - k / 3), "user.k": k + 1} for k in range(8)
    ]
    values = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 0.7, None]
    states = ["finished"] * 6 + ["pruned", "failed"]
    rows = [
        TrialRow(
            k, states[k], values[k], {**tried[k], "user.c": spaces[2].choices[k % 3]}, 3, hostile
        )
        for k in range(8)
    ]
    page = tmp_path / "sweep.html"
    page.write_text(sweep_page(hostile, spaces, "val_loss", rows, {"command": hostile}, "1"))
    with browser(tmp_path / "profile") as tab:
        for width, dark in ((1280, False), (400, True)):
            tab.open(page, width, dark=dark)
            assert (tab.errors, tab.requests) == ([], [page.as_uri()])
            assert tab.evaluate("document.title").startswith("ktrainer sweep: </script>")
            paths = tab.evaluate(
                "[...document.querySelectorAll('#parallel path')].map(p => p.getAttribute('d'))"
            )
            assert len(paths) == 8
            assert not any("NaN" in path or "undefined" in path for path in paths)
            assert sorted(path.count("L") for path in paths) == [2, *[3] * 7]
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.open(page, 1280)
        axis = "document.querySelectorAll('#parallel .handle')[3].getBoundingClientRect()"
        box = json.loads(tab.evaluate(f"JSON.stringify({axis})"))
        x, low = box["x"] + box["width"] / 2, box["y"] + box["height"]
        moves = [("mousePressed", low), ("mouseMoved", low - 60), ("mouseReleased", low - 60)]
        for kind, y in moves:
            event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            tab.call("Input.dispatchMouseEvent", **event)
        faded = "document.querySelectorAll('#parallel path.out').length"
        assert 0 < tab.evaluate(faded) < 8
        best = "document.querySelector('#parallel path.best').classList.contains('out')"
        assert tab.evaluate(best) is False
        tab.screenshot(tmp_path / "page.png")
