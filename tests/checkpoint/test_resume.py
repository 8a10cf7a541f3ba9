"""All ranks go on from the newest checkpoint that is whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ktrainer.distributed.array_transfer as bucketed
from ktrainer import distributed
from ktrainer.callbacks import Callback, Checkpoint, LearningRate
from ktrainer.checkpoint import resume
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from tests.callbacks.helpers import EachStep, Sized, everything, fit, rate_of, small_model

ALONE = SingleWorld()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    """Checkpoints of epochs 1 to 3, and the variables after 3 epochs."""
    directory = tmp_path_factory.mktemp("saved")
    model = small_model()
    fit(model, [Checkpoint(directory, every="1ep", keep=3)], epochs=3)
    return directory, everything(model)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def damage(directory: Path, step: int) -> None:
    file = directory / f"step-{step:08d}" / "arrays-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def test_auto_takes_the_latest(saved) -> None:
    model = small_model(seed=5)
    progress = resume("auto", saved[0], model=model, world=ALONE)
    assert progress is not None
    assert (progress.epoch, progress.step, progress.batch) == (3, 15, 0)
    for a, b in zip(saved[1], everything(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_never_and_nothing_there(saved, tmp_path) -> None:
    model = small_model()
    before = everything(model)
    assert resume("never", saved[0], model=model, world=ALONE) is None
    assert resume("auto", tmp_path / "empty", model=model, world=ALONE) is None
    for a, b in zip(before, everything(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_path_is_exactly_that(folder) -> None:
    wanted = str(folder / "step-00000010")
    progress = resume(wanted, "unused", model=small_model(), world=ALONE)
    assert progress is not None
    assert progress.step == 10
    damage(folder, 10)
    with pytest.raises(CheckpointError, match="damaged"):
        resume(wanted, "unused", model=small_model(), world=ALONE)
    progress = resume(str(folder), "unused", model=small_model(), world=ALONE)
    assert progress is not None
    assert progress.step == 15
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        resume(str(folder / "nowhere"), "unused", model=small_model(), world=ALONE)


def test_a_run_goes_back_to_checkpoints_of_its_own(folder) -> None:
    (run,) = {entry.run for entry in Store(folder).entries()}
    Store(folder).save({"a": np.zeros(1)}, {}, 20, facts={"run": "another"})
    progress = resume(
        "auto", folder, model=small_model(), world=ALONE, accepts=lambda entry: entry.run == run
    )
    assert progress is not None
    assert progress.step == 15
    damage(folder, 20)
    with (
        pytest.warns(UserWarning, match="step-00000020.*trying the one before"),
        pytest.raises(CheckpointError, match="all 1 checkpoints"),
    ):
        resume(
            "auto",
            folder,
            model=small_model(),
            world=ALONE,
            accepts=lambda entry: entry.run == "another",
        )


def test_a_folder_with_a_manifest_that_cannot_be_read(folder) -> None:
    (folder / "step-00000005" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="step-00000005.*trying the one before"):
        progress = resume(str(folder), "unused", model=small_model(), world=ALONE)
    assert progress is not None
    assert progress.step == 15


class HearsOfIt(Callback):
    def on_restore(self, progress: Any) -> None:
        self.heard = progress.step


def test_history_and_callbacks(saved) -> None:
    model, hears = small_model(), HearsOfIt()
    history = keras.callbacks.History()
    resume("auto", saved[0], model=model, world=ALONE, callbacks=[hears], history=history)
    assert hears.heard == 15
    assert history.epoch == [0, 1, 2]
    assert [len(v) for v in history.history.values()] == [3, 3]


def test_a_resumed_rate_does_not_compound(tmp_path) -> None:
    settings = {"scale": "linear", "warmup": "3ep", "world": Sized(4)}
    rate, model = LearningRate(**settings), small_model()
    fit(model, [rate, Checkpoint(tmp_path, every="1ep", callbacks=[rate])], epochs=2)

    rate, other = LearningRate(**settings), small_model(keras.optimizers.SGD(9.0, momentum=0.9))

    class Restores(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            resume("auto", tmp_path, model=other, world=ALONE, callbacks=[rate])

    rates = EachStep(rate_of)
    fit(other, [rate, Restores(), rates], epochs=4, initial_epoch=2)
    assert rates.seen[-1] == pytest.approx(0.4)
    assert rate_of(other) == pytest.approx(0.1)  # once trained, the base rate again
    whole = small_model()
    fit(whole, [LearningRate(**settings)], epochs=4)
    for a, b in zip(everything(whole), everything(other), strict=True):
        np.testing.assert_array_equal(a, b)


def _resume_on_ranks(directory: str, bucket: int) -> tuple[int, list[np.ndarray]]:
    here = distributed.current_world()
    if not here.is_root:
        directory = "/nowhere"  # a disk of its own, without the files
    bucketed.BUCKET_BYTES = bucket
    model = small_model(seed=here.rank)
    progress = resume("auto", directory, model=model, world=here)
    assert progress is not None
    return progress.step, everything(model)


@pytest.mark.exhaustive
def test_all_ranks_get_what_rank_zero_reads(ranks, saved) -> None:
    for step, variables in ranks(3).run(_resume_on_ranks, str(saved[0]), 20):
        assert step == 15
        for a, b in zip(saved[1], variables, strict=True):
            assert a.tobytes() == b.tobytes()


def _resume_into_another_model(directory: str) -> None:
    here = distributed.current_world()
    units = 3 if here.is_root else 4
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    resume("auto", directory, model=model, world=here)


def test_an_error_of_one_rank_is_raised_on_all(ranks, saved, folder) -> None:
    for outcome in ranks(2).outcomes(_resume_into_another_model, str(saved[0])):
        assert isinstance(outcome.error, CheckpointError)
        assert "does not fit" in str(outcome.error)
    for entry in Store(folder).entries():
        damage(folder, entry.step)
    for outcome in ranks(2).outcomes(_resume_quietly, str(folder)):
        assert isinstance(outcome.error, CheckpointError)
        assert "all 3 checkpoints" in str(outcome.error)


def _resume_quietly(directory: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    resume("auto", directory, model=small_model(), world=distributed.current_world())
