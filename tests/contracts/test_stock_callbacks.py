"""Keras' callbacks, and a user's own, work unchanged: alone as under `Model.fit`, on ranks, and
under strategies (parameter servers: in `tests/tf_distribute/test_servers.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.contracts import zoo
from tests.contracts.running import BATCH, ROWS, assert_same, digest
from tests.contracts.stock_callbacks import (
    EPOCHS,
    HOLDING,
    SCENARIOS,
    TOUCHING,
    Run,
    alone,
    compare,
    play,
    play_all,
)
from tests.dist.harness import leaks
from tests.tf_distribute.running import CLUSTER, ONE_PROCESS, make_devices

# Of Keras' variables, each time one of its callbacks makes a NumPy array of one.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.quick("user's own")
@pytest.mark.parametrize("name", SCENARIOS)
def test_stock_callbacks_do_in_one_process_what_they_do_under_keras(
    name: str, tmp_path: Path
) -> None:
    theirs = play(name, tmp_path / "keras", "keras", eager=True)
    ours = play(name, tmp_path / "ours", "local", eager=True)
    # After an epoch that was cut short the metrics are those of training, for a resume; under
    # Keras those of the validation that followed.
    if SCENARIOS[name].cut:
        ours.outcome.metrics = theirs.outcome.metrics = []
    assert_same(ours.outcome, theirs.outcome)
    assert str(ours.events) == str(theirs.events)  # as text, in which NaN is NaN
    assert ours.files == theirs.files
    assert str(ours.scalars) == str(theirs.scalars)
    assert ours.texts == theirs.texts


@pytest.fixture(scope="module")
def on_two_ranks(pool: Any, tmp_path_factory: Any) -> list[dict[str, Run]]:
    return pool.ranks(2).run(play_all, tmp_path_factory.mktemp("ranks"), deadline=250)


def check_ranks(name: str, first: Run, second: Run) -> None:
    """Two ranks did the same, and one wrote; as one process does."""
    assert str(first.outcome.history) == str(second.outcome.history)
    assert str(first.events) == str(second.events)
    assert digest(first.outcome) == digest(second.outcome)
    assert second.files == []
    if name == "user's own, on another rank":
        assert first.outcome.epochs == [0]
        assert sum(event[0] == "train_batch_end" for event in first.events) == 2
        return
    compare(first, alone(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_ranks(name: str, on_two_ranks: list[dict[str, Run]]) -> None:
    check_ranks(name, *(rank[name] for rank in on_two_ranks))


def under_strategy(
    strategy: str, devices: int, folder: Path, names: Iterable[str]
) -> dict[str, Run]:
    make_devices()
    keys = {"name": "tf_distribute", "strategy": strategy, "devices": devices}
    try:
        return play_all(folder, tuple(keys.items()), names)
    finally:
        if strategy == "multi_worker_mirrored":
            leaks.expect_ports()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "devices", "names"),
    [("mirrored", 2, TOUCHING), ("central_storage", 2, HOLDING)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_under_strategies(
    ranks: Callable[..., Any], strategy: str, devices: int, names: list[str], tmp_path: Path
) -> None:
    (ours,) = ranks(1, ONE_PROCESS).run(
        under_strategy, strategy, devices, tmp_path, names, deadline=250
    )
    for name, run in ours.items():
        compare(run, alone(name))


@pytest.mark.exhaustive
def test_under_multi_worker_mirrored(ranks: Callable[..., Any], tmp_path: Path) -> None:
    names = [*HOLDING, "TerminateOnNaN", "user's own, on another rank"]
    by_rank = ranks(2, f"{CLUSTER} 1").run(
        under_strategy, "multi_worker_mirrored", 1, tmp_path, names, deadline=250
    )
    for name in names:
        check_ranks(name, *(rank[name] for rank in by_rank))


def test_a_checkpoint_of_keras_loads(tmp_path: Path) -> None:
    play("ModelCheckpoint", tmp_path / "files", "local", eager=True)
    model = keras.models.load_model(tmp_path / "files" / f"{EPOCHS:02d}.keras")
    x, y = zoo.features_and_labels(ROWS)
    assert model.evaluate(x, y, verbose=0, return_dict=True)["loss"] < 2
    assert int(model.optimizer.iterations) == EPOCHS * math.ceil(ROWS / BATCH)
