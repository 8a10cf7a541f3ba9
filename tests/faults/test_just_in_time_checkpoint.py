"""Ranks of a hybrid pipeline die, and nothing of what they knew is lost (row 9)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ktrainer import distributed
from ktrainer.callbacks import Checkpoint
from ktrainer.checkpoint import read_checkpoint, verify
from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.config import load_config
from ktrainer.distributed.elastic_members import is_loss
from ktrainer.distributed.rank_layout import Layout
from ktrainer.elastic.just_in_time_checkpoint import Grid, LastState, write_last_checkpoint
from ktrainer.elastic.just_in_time_recovery import JustInTimeRecovery
from ktrainer.elastic.recovery_point import RecoveryPoint
from ktrainer.errors import CheckpointError
from tests.faults import hybrid_script
from tests.faults.test_healing import launch

SCRIPT = hybrid_script.__file__
HEAL = ("--heal", "-n", "4")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_replicas_save_the_state_of_lost_ranks(tmp_path: Path) -> None:
    """In the update, and one more while it saves; then all copies of a stage, in the schedule."""
    ended = launch(tmp_path, *HEAL, SCRIPT, str(tmp_path), "arrays", "3:9:update,0:0:saving")
    assert ended.returncode == 75, ended.stdout + ended.stderr
    saved = tmp_path / "run" / "checkpoints" / "step-00000009"
    (last,) = ended.stderr.splitlines()
    assert (
        "rank 0 (partition 0 of replica 0) and rank 3 (partition 1 of replica 1) were lost" in last
    )
    assert f"were lost after step 9: the state of that step is saved in {saved}" in last
    assert ". Started again, on as many processes, the run resumes from there" in last
    assert not verify(saved)
    ninth = read(saved)

    restarts = ("--max-restarts", "1", "--backoff", "0.1")
    fault = "0:12:schedule,2:12:schedule"
    ended = launch(tmp_path, *HEAL, *restarts, SCRIPT, str(tmp_path), "arrays", fault)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # History and weights are those of an undisturbed run, to the bit.
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    assert lines == ["[true, true]"] * 4
    first, _ = ended.stderr.splitlines()
    assert (
        "rank 0 (partition 0 of replica 0) and rank 2 (partition 0 of replica 1) were lost" in first
    )
    assert (
        "were lost after step 12: no copy of partition 0 has survived, so its state is lost"
        in first
    )
    assert first.endswith(f"the last checkpoint, of step 10, is {saved.parent}/step-00000010")
    same(ninth, read(tmp_path / "whole" / "checkpoints" / saved.name))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_loader_that_shuffles_continues_in_its_order(tmp_path: Path) -> None:
    """In the second epoch, whose order a generator draws after that of the first."""
    restarts = ("--max-restarts", "1", "--backoff", "0.1")
    ended = launch(tmp_path, *HEAL, *restarts, SCRIPT, str(tmp_path), "loader", "3:9:update")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "after step 9: the state of that step is saved" in ended.stderr
    assert [line.partition("] ")[2] for line in ended.stdout.splitlines()] == ["[true, true]"] * 4


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Arrays, state, and what the manifest says of the run."""
    arrays, state = read_checkpoint(path)
    manifest = json.loads((path / MANIFEST).read_text())
    names = ("step", "epoch", "batch", "world_size", "replicas", "partitions")
    copies = {name: np.array(array) for name, array in arrays.items()}
    return copies, state, {name: manifest[name] for name in names}


def same(found: Any, expected: Any) -> None:
    """The checkpoint is just what all ranks together would have written, to the bit."""
    arrays, state, facts = found
    whole, of_all, all_facts = expected
    assert facts == all_facts
    assert list(arrays) == list(whole)
    assert all(arrays[name].tobytes() == whole[name].tobytes() for name in whole)
    assert set(state) == set(of_all)
    for each in (state, of_all):
        del each["progress"]["elapsed"]
        each["callbacks"] = [c for c in each["callbacks"] if "Checkpoint" not in c["callback"]]
    assert any(name.endswith("/best_weights/0") for name in whole)
    assert state == of_all


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_who_writes_what(placement: Any) -> None:
    layout = Layout(3, 2, placement)
    grid = Grid({r: (layout.partition_of(r), layout.replica_of(r)) for r in range(6)})
    first = {p: layout.rank_of(p, 0) for p in range(3)}
    second = {p: layout.rank_of(p, 1) for p in range(3)}
    assert grid.writers(range(6)) == first
    left = [first[0], second[0], second[1], first[2]]
    assert grid.writers(left) == {0: first[0], 1: second[1], 2: first[2]}
    assert grid.lost(left) == []
    assert grid.lost([first[0], second[0]]) == [1, 2]
    # Whoever is the first rank afterwards writes, too: it completes the checkpoint.
    assert min(left) in grid.writers(left).values()
    assert grid.counting() == sorted([first[2], second[2]])
    assert grid.name(second[1]) == f"rank {second[1]} (partition 1 of replica 1)"


def written(folder: str, state: dict[str, Any]) -> str:
    """What came of writing a checkpoint together, in which rank 0 alone has `state`."""
    world: Any = distributed.current_world()
    names = [f"model/{rank}" for rank in range(world.size)]
    arrays = {names[world.rank]: np.ones(2)}
    state = state if world.is_root else {}
    last = LastState(1, arrays, names if world.is_root else [], state, {}, {})
    placement: Any = SimpleNamespace(partition=world.rank)
    try:
        return str(write_last_checkpoint(world, Store(Path(folder)), placement, True, last))
    except CheckpointError as error:
        return str(error)


def test_all_ranks_hear_of_a_state_that_cannot_be_saved(tmp_path: Path, ranks: Any) -> None:
    tables = {"callbacks": [{3: {4: 5}}]}
    (path, again) = ranks(2).run(written, str(tmp_path / "good"), tables)
    assert path == again
    assert read_checkpoint(Path(path))[1] == tables
    errors = ranks(2).run(written, str(tmp_path / "bad"), {"callbacks": [{(1, 2): 3}]}, deadline=60)
    assert all("must be strings, numbers or None, not (1, 2)" in error for error in errors)


def test_an_error_in_the_save_is_no_other_loss(monkeypatch: Any) -> None:
    def lose() -> None:
        raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def fail(self: JustInTimeRecovery) -> None:
        monkeypatch.setattr(JustInTimeRecovery, "_save", lambda self: pytest.fail("saves again"))
        raise ValueError("of a callback's state")

    monkeypatch.setattr(JustInTimeRecovery, "_save", fail)
    survivor: Any = object.__new__(JustInTimeRecovery)
    survivor.world = SimpleNamespace(phases=0, stable_rank=0, has_lost=is_loss, heal=list)
    with pytest.raises(ValueError, match="of a callback's state"):
        next(survivor.updates(SimpleNamespace(begin=lose)))


@pytest.mark.parametrize(("lost", "lacks"), [(3, True), (2, False)])
def test_metrics_too_large_to_exchange_are_named(lost: int, lacks: bool) -> None:
    """Lost ranks of the last partition had counts; surviving ones have theirs."""
    places = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
    left = [rank for rank in places if rank != lost]
    survivor: Any = object.__new__(JustInTimeRecovery)
    survivor.grid = Grid(places)
    survivor.world = SimpleNamespace(
        stable_rank=1,
        members=[SimpleNamespace(stable_rank=rank) for rank in left],
        allgather=lambda here, what: [(rank, here[1]) for rank in left],
    )
    states = {"known": [np.zeros(2)], "now": [np.ones(2)]}
    survivor._counts = SimpleNamespace(
        omitted=["auc"], states=lambda row=None: states["now" if row is None else "known"]
    )
    survivor._counted = np.zeros((4, 3))
    survivor._point = RecoveryPoint(progress={"batch": 2})
    said = ", without what lost ranks had counted in the metrics auc in this epoch"
    assert survivor._omission_text() == (said if lacks else "")
    sums = {rank: found[0].sum() for rank, found in survivor._states_of_all().items()}
    assert sums == {rank: 0.0 if rank == lost else 2.0 for rank in places}


@pytest.mark.parametrize(
    ("mode", "started_again", "expected"),
    [
        ("auto", None, "step-00000009"),  # with which this run has begun
        ("never", None, "step-00000004"),
        ("elsewhere", None, "step-00000004"),
        ("never", "second", "step-00000006"),  # saved by an earlier start of the launch
        ("never", "none", None),
    ],
)
def test_the_last_checkpoint_is_of_this_run(
    tmp_path: Path, monkeypatch: Any, mode: str, started_again: str | None, expected: str | None
) -> None:
    """Those of other runs in the folder are not resumed from."""
    store = Store(tmp_path / "checkpoints")
    for step, run in ((4, "first"), (6, "second"), (9, "other")):
        store.save({"a": np.zeros(2)}, {}, step, facts={"run": run})
    monkeypatch.setattr(
        "ktrainer.elastic.just_in_time_recovery.run_before", lambda folder: started_again
    )
    saver = Checkpoint(every="1ep")
    saver.load_state_dict({"run": "first"})
    config = load_config(None, [f"checkpoint.resume={mode}"])
    survivor = object.__new__(JustInTimeRecovery)
    survivor.run = SimpleNamespace(every=[saver], context=SimpleNamespace(config=config))
    found = survivor._latest(store)
    assert (found and found.path.name) == expected
    survivor.run.every = []  # checkpointing is off
    if (mode, started_again) == ("never", None):
        assert survivor._latest(store) is None
