"""Rows 7 and 18: a run resumes as if it had never been interrupted."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer.errors import CheckpointError
from tests.faults.runs import CASES, STEPS, Result, resumed, seen, train
from tests.tf_distribute.running import ONE_PROCESS


def differences(found: Result, expected: Result) -> list[str]:
    """In what the two differ."""
    names = [n for n in expected.variables if found.variables.get(n) != expected.variables[n]]
    names += [n for n in found.variables if n not in expected.variables]
    if found.history != expected.history:
        names.append(f"History: {found.history} instead of {expected.history}")
    if found.step != expected.step:
        names.append(f"step {found.step} instead of {expected.step}")
    return names


@pytest.mark.quick("precision")
@pytest.mark.parametrize("name", ["callbacks", "precision"])
def test_row_07_resume_at_any_step(tmp_path: Path, name: str) -> None:
    """Row 1 resumes at steps 3 and 4, after a killed save; row 8 at 5 and 8, after a signal."""
    case = CASES[name]
    whole, batches = seen(lambda: train(tmp_path / "whole", case))
    assert whole.step == STEPS
    for step in (1, 2, 6, 7) if name == "callbacks" else (1,):
        rest, remaining = seen(lambda: resumed(tmp_path / "whole", tmp_path, case, step))  # noqa: B023
        assert not differences(rest, whole), step
        if batches:
            assert remaining == batches[step:], step
    if name == "callbacks":
        assert whole.history["learning_rate"] == pytest.approx([0.05, 0.05, 0.05, 0.025])


@pytest.mark.quick("unseeded tf.data")
@pytest.mark.parametrize("name", ["unseeded tf.data", "generator"])
def test_row_07_other_data(tmp_path: Path, name: str) -> None:
    """A seeded `tf.data` resumes on ranks, a `PyDataset` with a strategy."""
    case = CASES[name]
    whole, batches = seen(lambda: train(tmp_path / "whole", case))
    assert whole.step == STEPS
    assert len(set(batches)) == (STEPS if name != "generator" else STEPS // 2)
    step = 6  # in the second epoch, if there is one
    rest, remaining = seen(lambda: resumed(tmp_path / "whole", tmp_path, case, step))
    assert not differences(rest, whole)
    assert remaining == batches[step:]


def on_ranks(directory: str, name: str, steps: list[int], *words: str) -> list[list[str]]:
    """The whole run, and from each of `steps` on; returns in what they differ."""
    folder, case = Path(directory), CASES[name]
    whole = train(folder / "whole", case, *words)
    assert whole.step == STEPS
    return [
        differences(resumed(folder / "whole", folder, case, step, *words), whole) for step in steps
    ]


@pytest.mark.exhaustive
def test_row_07_data_parallel(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Horovod resumes after a restart (`test_restarted.py`)."""
    group = ranks(2)
    # In the first epoch, whose first batch ranks have compared: from states, and read again.
    for case, step, *more in (
        ("tf.data", 2),
        ("tf.data", 2, "checkpoint.iterators=false"),
        ("unseeded tf.data", 5, "data.batch=per_worker"),
    ):
        task = (on_ranks, str(tmp_path / case), case, [step], "backend=data_parallel", *more)
        assert group.run(*task, deadline=180) == [[[]], [[]]], case


STRATEGY = ("backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=2")


@pytest.mark.quick("compiled")
@pytest.mark.parametrize("case", ["compiled", "judged, tf.data"])
def test_row_07_pipeline(ranks: Callable[..., Any], tmp_path: Path, case: str) -> None:
    words = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2")
    for found in ranks(2).run(on_ranks, str(tmp_path), case, [5], *words, deadline=180):
        assert found == [[]]


@pytest.mark.exhaustive
def test_row_07_tf_distribute(ranks: Callable[..., Any], tmp_path: Path) -> None:
    task = (on_ranks, str(tmp_path), "compiled, PyDataset", [5], *STRATEGY)
    assert ranks(1, ONE_PROCESS).run(*task, deadline=120) == [[[]]]


LAYOUTS = {
    "three": (3, ("backend=data_parallel",)),
    "four": (4, ("backend=data_parallel",)),
    "pipeline": (2, ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2")),
    "strategy": (1, STRATEGY),
}


def part(directory: str, name: str, step: int | None, *words: str) -> Result:
    """In float64: all of the run, or what is left after `step`."""
    keras.config.set_floatx("float64")  # and the policy, as `train` clears the session
    folder, case = Path(directory), CASES[name]
    if step is None:
        return train(folder / "whole", case, *words)
    return resumed(folder / "whole", folder, case, step, *words)


def run_on(ranks: Callable[..., Any], layout: str, *args: Any) -> list[Result]:
    size, words = LAYOUTS[layout]
    return ranks(size, ONE_PROCESS if layout == "strategy" else "").run(
        part, *args, *words, deadline=120
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("begun", "kind", "step", "continued"),
    [
        ("four", "double, PyDataset", 2, ["three", "pipeline"]),
        ("pipeline", "double, tf.data", 6, ["strategy"]),
    ],
)
def test_row_18_another_world_size(
    ranks: Callable[..., Any],
    tmp_path: Path,
    begun: str,
    kind: str,
    step: int,
    continued: list[str],
) -> None:
    """In mid-epoch: were a sample left out, or seen twice, or weighted otherwise, the weights and
    losses would differ in the first digits."""
    whole = run_on(ranks, begun, str(tmp_path), kind, None)
    expected = {name: value for each in whole for name, value in each.variables.items()}
    assert len(expected["model/sequential/dense/kernel"]) == 6 * 5 * 8, "float64"
    for layout in continued:
        for found in run_on(ranks, layout, str(tmp_path), kind, step):
            assert found.step == STEPS
            close_to(found.history, whole[0].history)
            for name, value in found.variables.items():
                if len(value) % 8 == 0 and not name.startswith("seed"):
                    ours, theirs = np.frombuffer(value), np.frombuffer(expected[name])
                    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10, err_msg=name)
        clear(tmp_path / f"killed-{step}")


def test_row_18_other_examples_would_be_left(tmp_path: Path) -> None:
    case, every = CASES["double"], "checkpoint.every=1ep"
    train(tmp_path, case, every, "trainer.max_steps=3")
    for word, says in (
        ("data.batch_size=5", "examples in a batch: 4 then, 5 now"),
        ("trainer.accumulate=2", "trainer.accumulate: 1 then, 2 now"),
        ("data.shuffle=false", "data.shuffle: True then, False now"),
        ("seed=7", "seed: 0 then, 7 now"),
    ):
        with pytest.raises(CheckpointError, match=f"(?s)after update 3 of epoch 1.*\n.*{says}"):
            train(tmp_path, case, every, word)
    assert train(tmp_path, case, every, "trainer.max_steps=4").step == 4  # the end of the epoch
    assert train(tmp_path, case, every, word).step == STEPS


@pytest.mark.exhaustive
def test_row_18_another_number_of_batches(tmp_path: Path) -> None:
    case = CASES["compiled, tf.data"]  # of 4 batches an epoch, read again up to where it resumes
    longer = dataclasses.replace(case, rows=22)
    words = ("checkpoint.every=1ep", "checkpoint.iterators=false")
    train(tmp_path, case, "trainer.max_steps=3", *words)
    says = "after update 3 of epoch 1.*\n.*batches in an epoch: 4 then, 6 now"
    with pytest.raises(CheckpointError, match=says):
        train(tmp_path, longer, *words)
    limit = "trainer.limit_train_batches=4"  # of the same data: the same batches come first
    assert train(tmp_path, case, "trainer.max_steps=4", limit, *words).step == 4
    assert train(tmp_path, longer, "trainer.max_steps=6", *words).step == 6


def their_own(directory: str, backend: str, *words: str) -> int:
    words = (f"backend={backend}", "data.batch=per_worker", "data.batch_size=2", *words)
    return train(Path(directory), CASES["double"], *words).step


def test_row_18_a_batch_for_each_process(ranks: Callable[..., Any], tmp_path: Path) -> None:
    group, task = ranks(2), (their_own, str(tmp_path), "data_parallel")
    assert group.run(*task, "trainer.max_steps=3") == [3, 3]
    with pytest.raises(CheckpointError, match="examples in a batch: 4 then, 2 now"):
        their_own(str(tmp_path), "local")
    assert group.run(*task) == [8, 8]


def test_row_18_without_a_seed(tmp_path: Path) -> None:
    """The order that was drawn at the start is that of the rest, and of the epochs to come."""
    case, batches = CASES["callbacks"], []
    for words in (["trainer.max_steps=3"], []):
        more = ("seed=null", "data.batch_size=1", "trainer.epochs=1", *words)
        batches += seen(lambda: train(tmp_path, case, *more))[1]  # noqa: B023
    assert len(batches) == len(set(batches)) == case.rows


def close_to(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert set(found) == set(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-10, err_msg=key)


def clear(folder: Path) -> None:
    """So that the next one begins where the first was killed."""
    shutil.rmtree(folder)
