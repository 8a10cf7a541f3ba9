"""What a process of a pipeline holds, saves, takes up again, and refuses."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.errors import ModelError
from tests.pipeline.equal import Case, Outcome, configure, local, pipeline, same, train
from tests.pipeline.trained import classes, data_of

Ranks = Callable[..., Any]

QUIET = ("logging.progress=none", "logging.csv=false", "world.deadline=30")
WHOLE = Case("mlp", epochs=3)  # 17 updates an epoch
STOP = 25


def _part(
    directory: str, backend: tuple[str, ...], *words: str, save: str | None = None
) -> Outcome:
    """A part of `WHOLE`, from and to the checkpoints of a folder; without the logs of its batches,
    which are a part of the whole's."""
    words = (f"run.dir={directory}", f"checkpoint.every={STOP}ba", *words)
    case = Case(WHOLE.model, epochs=WHOLE.epochs, settings=words)
    return replace(train(case, backend, save), batches=[])


@pytest.mark.exhaustive
def test_another_number_of_processes_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch by two stages; then as if nothing had been."""
    two, end = pipeline(2, "backend.microbatches=4"), f"trainer.max_steps={STOP}"
    ranks(2).run(_part, str(tmp_path / "two"), two, end, deadline=120)
    for name in ("one", "three", "data"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
    saved = [str(tmp_path / f"{size}.keras") for size in (1, 3)]
    three, alone = pipeline(3, "backend.microbatches=4"), pipeline(1, "backend.microbatches=4")
    found = {
        "one": ranks(1).run(_part, str(tmp_path / "one"), alone, save=saved[0]),
        "three": ranks(3).run(_part, str(tmp_path / "three"), three, save=saved[1]),
        # In processes that were stages before: then they shared the data in another way.
        "data": ranks(2).run(_part, str(tmp_path / "data"), ("backend=data_parallel",)),
    }
    for ours in found.values():
        same(local(WHOLE), ours)
    for path in saved:
        _loads_anywhere(path)


def _loads_anywhere(path: str) -> None:
    """A file of Keras alone, which predicts what the model did that was saved."""
    with zipfile.ZipFile(path) as archive:
        assert b"ktrainer" not in archive.read("config.json")
    configure("float64")
    x = data_of(WHOLE.model)[0][: 2 * WHOLE.batch]
    outputs = keras.models.load_model(path).predict(x, verbose=0)
    np.testing.assert_allclose(outputs, local(WHOLE).predicted[0], 1e-10, 1e-12)


class Noted(keras.initializers.GlorotUniform):
    """Remembers the values that it has made."""

    made: list[tuple[int, ...]] = []

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        if tf.executing_eagerly():  # in a graph it is only traced
            self.made.append(tuple(shape))
        return super().__call__(shape, dtype)


def _noted() -> Any:
    kernels = [keras.layers.Dense(n, "tanh", kernel_initializer=Noted(n)) for n in (4, 5, 6, 7)]
    model = keras.Sequential([keras.Input((6,)), *kernels])
    model.compile(keras.optimizers.Adam(), classes(), metrics=["accuracy"])
    return model


def _noted_and_built() -> Any:
    """With slots that have values, as a model that is loaded."""
    model = _noted()
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(np.ones(variable.shape))
    return model


def _held(
    build: Callable[[], Any], by_function: bool
) -> tuple[int, int, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Parameters held here, and in all; the kernels that were made, and those that are held."""
    from ktrainer.steps.remote_variable import is_remote
    from ktrainer.steps.variable_placement import placement_of

    Noted.made = []
    words = [*pipeline(3, "backend.microbatches=2"), *QUIET]
    with Trainer(overrides=words) as trainer:
        x, y = data_of("plain", 32)
        trainer.fit(build if by_function else build(), (x, y))
        assert int(trainer.model.optimizer.iterations) == 1 + (build is _noted_and_built)
        model, placement = trainer.model, placement_of(trainer.model)
        variables = [*model.variables, *model.optimizer.variables]
        for variable in variables:
            remote = is_remote(variable)
            assert (remote is None) == placement.holds(variable), variable.path
            assert (variable._value is None) == (remote is not None), variable.path
            if remote is not None:
                assert remote.partition != placement.partition
                with pytest.raises(ModelError, match=f"on stage {remote.partition}"):
                    variable.numpy()
        mine = [v for v in variables if placement.holds(v)]
        kernels = [tuple(v.shape) for v in model.weights if placement.holds(v) and v.ndim == 2]
        count = [sum(int(np.prod(v.shape)) for v in vs if v.ndim) for vs in (mine, variables)]
        return *count, list(Noted.made), kernels


@pytest.mark.parametrize(
    ("build", "by_function"),
    [(_noted, True), (_noted, False), (_noted_and_built, True)],
    ids=["function", "instance", "loading function"],
)
def test_each_process_holds_its_own(
    ranks: Ranks, build: Callable[[], Any], by_function: bool
) -> None:
    found = ranks(3).run(_held, build, by_function)
    assert sum(held for held, *_ in found) == found[0][1]
    assert all(0 < held < whole for held, whole, *_ in found)
    for _, _, made, held in found:
        assert made == held if by_function else len(made) == 4


def _compiled(optimizer: Any, **settings: Any) -> Any:
    layers = [keras.layers.Dense(4), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer, classes(), **settings)
    return model


def _refusals() -> list[str]:
    """What is said of models that a pipeline cannot train."""
    said = []
    builders = (
        lambda: _compiled("sgd", run_eagerly=True),
        lambda: _compiled(keras.optimizers.Adam(gradient_accumulation_steps=2)),
    )
    for build in builders:
        with (
            Trainer(overrides=[*pipeline(2, "backend.microbatches=2"), *QUIET]) as trainer,
            pytest.raises(ModelError) as error,
        ):
            trainer.fit(build, data_of("plain", 32))
        said.append(str(error.value))
    return said


def test_models_that_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(_refusals)
    assert first == second
    eager, accumulating = first
    assert "run_eagerly=True" in eager
    assert "Adam(gradient_accumulation_steps=...) is not supported in a pipeline" in accumulating
    assert "set trainer.accumulate instead" in accumulating
