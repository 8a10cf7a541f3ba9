"""Trackers hold the rows of a run, each once, through kills, restarts and a failing tracker."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer import ConfigError
from ktrainer.config import load_config
from ktrainer.config.watch_checks import require_trackers
from ktrainer.runs.run_record import RunRecord
from tests.processes import ktrainer, script
from tests.runs.recorded import train
from tests.trackers.tracked import TRACKERS
from tests.trackers.tracked import words as words_of

INSTALLED = [name for name in TRACKERS if find_spec(name) is not None]
SCRIPT = Path(__file__).with_name("tracked.py")
STORES = SCRIPT.with_name("stores.py")
needs_one = pytest.mark.skipif(not INSTALLED, reason="no tracker is installed: make trackers")


def tracked(folder: Path, seconds: float | str = 0.0, *words: str, **env: str) -> Any:
    """A run in a process of its own, with stores beside its folder."""
    return script(SCRIPT, folder, seconds, *words, cwd=folder.parent, **(_env(folder) | env))


def _env(folder: Path) -> dict[str, str]:
    return {"TRACKIO_DIR": str(folder.parent / "trackio"), "WANDB_MODE": "offline"}


def stores(folder: Path, names: list[str]) -> Any:
    """The rows in stores, read by a process that has these stores from its start."""
    done = script(STORES, folder, *names, cwd=folder, TRACKIO_DIR=str(folder / "trackio"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
    return json.loads(line[4:])


def expected(folder: Path) -> dict[str, dict[str, float]]:
    """The rows of a run's record by step, with the names that trackers get."""
    found: dict[str, dict[str, float]] = {}
    for row in RunRecord(folder).rows:
        part = {"log": "train", "validation": "validation", "epoch": "epoch"}[row["event"]]
        for name, value in row["metrics"].items():
            validated = part != "train" and name.startswith("val_")
            home = "validation" if validated else part
            key = f"{home}/{name.removeprefix('val_') if validated else name}"
            found.setdefault(str(row["step"]), {})[key] = value
    return found


def check(folder: Path, runs: int = 1) -> dict[str, dict[str, float]]:
    """The rows of all loggers are those of the record, in one run each of trackers."""
    rows = expected(folder)
    for name, found in stores(folder.parent, ["csv", "tensorboard", *INSTALLED]).items():
        assert len(found) == (runs if name in INSTALLED else 1), name
        assert (_rounded(rows) if name == "tensorboard" else rows) in found, name
    return rows


def _rounded(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """To float32, which TensorBoard has."""
    return {step: {k: float(np.float32(v)) for k, v in row.items()} for step, row in rows.items()}


def test_a_killed_run_continues_in_the_same_run_of_the_tracker(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    cut.parent.mkdir()
    train(whole, "logging.csv=false")
    assert tracked(cut, 0.4).returncode == -signal.SIGKILL
    done = tracked(cut)
    assert done.returncode == 0, done.stderr
    rows = check(cut)
    assert len(rows) == 18
    assert rows == expected(whole)
    assert len(RunRecord(cut).starts) == 2


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_several_kills(tmp_path: Path) -> None:
    """At any moment of training; then the rows are those of the undisturbed run."""
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    words = ("trainer.epochs=12",)
    cut.parent.mkdir()
    train(whole, "logging.csv=false", *words)
    for seconds in ("begin+0.07", 0.31, 0.46, 0.57):
        assert tracked(cut, seconds, *words).returncode == -signal.SIGKILL
    done = tracked(cut, 0.0, *words)
    assert done.returncode == 0, done.stderr
    assert len(RunRecord(cut).starts) in (4, 5)  # the first may be killed before it is recorded
    assert check(cut) == expected(whole)


@pytest.mark.exhaustive
def test_rank_0_sends(tmp_path: Path) -> None:
    """And the rank that takes its place when it is lost."""
    folder, words = tmp_path / "run", ("backend=data_parallel", "world.deadline=30")
    launch = ("run", "-n", 2, "--heal", SCRIPT, *words, "--", folder, "rank0")
    done = ktrainer(*launch, cwd=tmp_path, **_env(folder))
    assert done.returncode == 0, done.stderr
    rows = check(folder)
    assert len(rows) == 18
    lost = [event["lost"] for event in RunRecord(folder).events if event["event"] == "ranks"]
    assert lost == [[0]]


@needs_one
@pytest.mark.exhaustive
def test_from_scratch_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    """What a tracker was sent cannot be taken back."""
    folder = tmp_path / "run"
    words = ("checkpoint.every=null", "trainer.epochs=1")
    for seed in (3, 4):
        done = tracked(folder, 0.0, *words, f"seed={seed}")
        assert done.returncode == 0, done.stderr
    assert len(check(folder, runs=2)) == 6


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="MLflow is not installed: make trackers")
@pytest.mark.exhaustive
def test_a_tracker_that_does_not_answer(tmp_path: Path) -> None:
    """Training ends as without it, with a warning; the next start sends what is missing."""
    folder, words = tmp_path / "run", ["logging.wandb=null", "logging.trackio=null"]
    away = "logging.mlflow={tracking_uri: 'http://127.0.0.1:9'}"
    done = tracked(folder, 0.0, *words, away, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stderr.count("logging.mlflow: the tracker failed") <= 2  # soon, at the end
    assert "It lacks the values of 18 steps" in done.stderr
    assert tracked(folder, 0.0, *words).returncode == 0
    (rows,) = stores(tmp_path, ["mlflow"])["mlflow"]
    assert rows == expected(folder)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["logging.wandb={api_key: x}"], r"logging\.wandb\.api_key: .*no credentials"),
        (
            ["logging.wandb={settings: {api_key: x}}"],
            r"logging\.wandb\.settings\.api_key: .*no credentials",
        ),
        (["logging.wandb={id: x}"], r"logging\.wandb\.id: ktrainer sets it"),
        (["logging.mlflow={experimnt: x}"], r"unknown argument.*experiment"),
        (["logging.trackio=true"], r"logging\.trackio: expected a group of NAME: VALUE or null"),
    ],
)
def test_arguments_that_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, words)


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed: make trackers")
def test_a_secret_of_the_command_line_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from ktrainer import Trainer\n"
        "from tests.small import build, data\n"
        "with Trainer.from_cli(defaults={'user': {'api_key': ''}}) as trainer:\n"
        "    trainer.fit(build, data())\n"
    )
    secret, run = "s3cr3t-of-mine", tmp_path / "run"
    words = (f"run.dir={run}", f"user.api_key={secret}", "logging.wandb={mode: offline}")
    done = script(path, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file != path]
    assert any(file.suffix == ".wandb" for file in files)
    assert [file for file in files if secret.encode() in file.read_bytes()] == []


IMPORTS = """
import sys
from ktrainer import Trainer
from tests.small import build, data

with Trainer.from_cli() as trainer:
    trainer.fit(build, data())
    found = [name for name in ("wandb", "mlflow", "trackio") if name in sys.modules]
    print(f"rank {trainer.world.rank} has imported {found}", file=sys.stderr, flush=True)
"""


@needs_one
def test_rank_0_alone_imports_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IMPORTS)
    folder = tmp_path / "run"
    words = (
        "backend=data_parallel",
        "logging.progress=none",
        f"run.dir={folder}",
        *words_of(folder),
    )
    done = ktrainer("run", "-n", 2, "train.py", *words, cwd=tmp_path, **_env(folder))
    assert done.returncode == 0, done.stderr
    assert f"rank 0 has imported {INSTALLED}" in done.stderr
    assert "rank 1 has imported []" in done.stderr


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed: make trackers")
def test_an_argument_that_a_library_does_not_know(tmp_path: Path) -> None:
    """Is refused on all ranks, though rank 0 alone looks."""
    (tmp_path / "train.py").write_text(IMPORTS)
    words = ("backend=data_parallel", "world.deadline=60", "logging.wandb={projct: x}")
    done = ktrainer("run", "-n", 2, "train.py", *words, cwd=tmp_path)
    assert done.returncode != 0
    said = "ConfigError: logging.wandb.projct: wandb.init of the installed version has no such"
    assert said in done.stderr
    assert "DeadlineExceeded" not in done.stderr


@pytest.mark.skipif("trackio" in INSTALLED, reason="Trackio is installed")
def test_the_launcher_refuses_before_any_process(tmp_path: Path) -> None:
    done = ktrainer("run", "-n", 2, SCRIPT, "logging.trackio={project: x}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ktrainer run: error: logging.trackio: needs the package trackio")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktrainer.config.watch_checks.find_spec", lambda _: None)
    config = load_config(None, [f"logging.{name}={{}}"])
    with pytest.raises(ConfigError, match=rf'pip install "\.\[{name}\]"'):
        require_trackers(config)
    require_trackers(load_config(None, [f"logging.{name}={{}}", "trainer.fast_dev_run=true"]))
