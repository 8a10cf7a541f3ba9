"""The study of a sweep: opened again at any time, it goes on as if it had stayed open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Callback, Trainer
from ktrainer.errors import ConfigError, SetupError
from ktrainer.tuning.search_space import Space, read_space
from ktrainer.tuning.sweep_reports import TrialPruned
from ktrainer.tuning.sweep_study import SweepStudy, TrialReports, storage_in
from ktrainer.tuning.sweep_trial import PRUNED, VARIABLE, SweepTrial

SETTINGS = {"mode": "min", "sampler": "tpe", "pruner": "median", "seed": 3, "words": ["a"]}


def spaces(*words: str) -> list[Space]:
    return [space for each in words if (space := read_space(each)) is not None]


REAL = spaces("a=log(1e-4,1e-1)", "b=uniform(-1,1)", "k=int(1,9)", "c=x,y,z")
COUNTED = spaces("k=int(1,3)", "c=x,y")


def opened(folder: Path, over: Sequence[Space] = REAL, **settings: Any) -> SweepStudy:
    return SweepStudy(storage_in(folder), "sweep", {**SETTINGS, **settings}, over)


def loss(values: dict[str, Any]) -> float:
    found = (values["k"] - 4) ** 2 + len(values["c"] * 2) + (values["c"] == "y")
    return found + (math.log10(values["a"]) + 2) ** 2 + values["b"] if "a" in values else found


def sweep(open_study: Callable[[], SweepStudy], count: int) -> list[tuple[Any, ...]]:
    """The trials of a sweep whose study `open_study` returns for each part of it."""
    while (trial := open_study().next_trial(count)) is not None:
        study = open_study()
        again = study.next_trial(count)  # killed while it ran
        assert again is not None
        assert (again.number, again.params) == (trial.number, trial.params)
        if trial.number == 2:
            study.finish(trial.number, "failed", None, why="planted")
        else:
            study.finish(trial.number, "finished", loss(trial.params))
    return [(t.number, t.params, t.value) for t in open_study().trials]


@pytest.mark.parametrize(
    ("sampler", "over"), [("tpe", REAL), ("random", REAL), ("grid", COUNTED), ("tpe", COUNTED)]
)
def test_a_study_that_is_opened_again_goes_on_the_same(
    tmp_path: Path, sampler: str, over: list[Space]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    kept = opened(one, over, sampler=sampler)
    undisturbed = sweep(lambda: kept, 12)
    assert sweep(lambda: opened(two, over, sampler=sampler), 12) == undisturbed
    assert [number for number, *_ in undisturbed] == list(range(6 if sampler == "grid" else 12))
    tried = {tuple(values.values()) for _, values, _ in undisturbed}
    if sampler == "grid":
        assert tried == {(k, c) for k in (1, 2, 3) for c in "xy"}
    elif over is REAL:
        assert len(tried) == 12
        assert all(1e-4 <= a <= 0.1 and -1 <= b <= 1 and k in range(1, 10) for a, b, k, _ in tried)


def test_another_seed_tries_others(tmp_path: Path) -> None:
    first = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        trial = opened(tmp_path / str(seed), seed=seed).next_trial(1)
        assert trial is not None
        first.append(trial.params)
    assert first[0] != first[1]


def test_best_first(tmp_path: Path) -> None:
    study = opened(tmp_path, mode="max", sampler="random")
    for state, value in [("failed", None), ("finished", 1.0), ("finished", 3.0), ("pruned", None)]:
        trial = study.next_trial(9)
        assert trial is not None
        study.finish(trial.number, state, value)
    study.next_trial(9)
    assert [trial.number for trial in study.best] == [2, 1, 3, 0, 4]


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    said = "begun with another words: a, not b. Its trials could not be compared"
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, words=["b"])
    with pytest.raises(ConfigError, match="begun with another seed: 3, not 4"):
        opened(tmp_path, seed=4)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b ü?x=1#y %20z'"
    folder.mkdir()
    opened(folder)
    assert [path.name for path in folder.iterdir()] == ["study.db"]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_storage_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"nodb://\*\*\*@host/x cannot be used") as caught:
        SweepStudy("nodb://me:hidden@host/x", "sweep", SETTINGS, REAL)
    assert "hidden" not in str(caught.value)
    with pytest.raises(SetupError, match="cannot be used"):
        opened(tmp_path / "nowhere")


def reports(folder: Path, number: int, pruner: str) -> TrialReports:
    keys = tuple(space.key for space in REAL)
    request = (str(folder), number, keys, None, pruner, storage_in(folder), "sweep")
    return TrialReports(SweepTrial(*request))


def test_values_of_a_killed_run_do_not_prune_it(tmp_path: Path) -> None:
    """The median pruner looks at the newest value that is stored, of whichever run."""
    study = opened(tmp_path)
    for _ in range(5):
        trial = study.next_trial(9)
        assert trial is not None
        ours = reports(tmp_path, trial.number, "median")
        asked = [(1, 1.0), (2, 0.5), (3, 0.1)]
        assert [ours.report(*each) for each in asked] == [False] * 3
        study.finish(trial.number, "finished", 0.1)
    trial = study.next_trial(9)
    assert trial is not None
    killed = reports(tmp_path, trial.number, "median")
    asked = [(1, 0.9), (2, 0.4), (3, 0.3)]
    assert [killed.report(*each) for each in asked] == [False, False, True]
    again = reports(tmp_path, trial.number, "median")
    assert [again.report(*each) for each in asked] == [False, False, True]
    study.finish(trial.number, "pruned", None)
    assert study.trials[-1].value == 0.3


@pytest.mark.parametrize("pruner", ["halving", "hyperband"])
def test_a_trial_that_is_killed_and_continued_stays_on_its_rung(
    tmp_path: Path, pruner: str
) -> None:
    """Continued from any value, the pruner answers as if the trial had not been killed."""

    def train(folder: Path, *begins: int) -> list[list[bool]]:
        """What each trial is told after each value, by runs that begin after so many values."""
        folder.mkdir()
        study, told = opened(folder, pruner=pruner), []
        for values in np.random.default_rng(2).uniform(size=(7, 4)).tolist():
            trial = study.next_trial(99)
            assert trial is not None
            answers = [False] * len(values)
            for begin in begins:
                ours = reports(folder, trial.number, pruner)
                for count, value in list(enumerate(values, 1))[begin:]:
                    answers[count - 1] = ours.report(count, value)
            told.append(answers)
            study.finish(trial.number, "finished", values[-1])
        return told

    undisturbed = train(tmp_path / "one", 0)
    assert any(answer for told in undisturbed for answer in told)
    assert train(tmp_path / "two", 0, 2, 3, 0) == undisturbed


@pytest.mark.parametrize("fails", [False, True])
def test_a_pruned_trial_ends_the_script_unless_it_fails(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if fails:
                raise RuntimeError("planted")

    study = opened(tmp_path)
    for _ in range(5):
        trial = study.next_trial(9)
        assert trial is not None
        assert not reports(tmp_path, trial.number, "median").report(1, 0.0)
        study.finish(trial.number, "finished", 0.0)
    trial = study.next_trial(9)
    assert trial is not None
    request = (str(tmp_path / "run"), trial.number, ("trainer.epochs",), None, "median")
    sweep_trial = SweepTrial(*request, storage_in(tmp_path), "sweep")
    monkeypatch.setenv(VARIABLE, sweep_trial.to_environment()[VARIABLE])
    monkeypatch.setattr("ktrainer.tuning.sweep_trial._configured", False)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    words = ["trainer.epochs=3", "logging.progress=none"]
    with Trainer.from_cli([Fails()], words) as trainer:
        with pytest.raises(RuntimeError if fails else TrialPruned):
            trainer.fit(model, np.ones((8, 2), np.float32), np.full((8, 1), 9.0))
        assert trainer.state.stop_reason == PRUNED
        assert trainer.state.progress.epoch == 1
