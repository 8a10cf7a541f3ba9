"""Which checkpoints there are, which are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktrainer.checkpoint.format.checkpoint_store as store_module
from ktrainer.checkpoint.format.checkpoint_store import Store


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def save(store: Store, step: int, value: float | None = None) -> None:
    facts = {} if value is None else scored(value)
    store.save({"a": np.full(2, step)}, {"step": step}, step, facts=facts)


def scored(value: float, name: str = "val_loss", mode: str = "min") -> dict[str, Any]:
    return {"metric": {"name": name, "value": value, "mode": mode}}


def test_keeps_the_last_and_the_best(tmp_path) -> None:
    store = Store(tmp_path)
    for step, value in enumerate([3.0, 1.0, 2.0, 2.5, 1.0], start=1):
        save(store, step, value)
        store.prune(2)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    best, latest = store.best("val_loss", "min"), store.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, latest.step) == (2, 5)
    worst = store.best("val_loss", "max")
    assert worst is not None
    assert worst.step == 4
    assert store.best("other", "min") is None


def test_the_latest_is_the_last_saved_not_the_furthest(tmp_path) -> None:
    """A fresh start in an old folder must not lose its checkpoints to those of before."""
    store = Store(tmp_path)
    for step in (100, 200, 10, 20):
        save(store, step)
        store.prune(2)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert [entry.step for entry in store.entries()] == [20, 10]


def test_each_run_keeps_its_best(tmp_path) -> None:
    store = Store(tmp_path)
    for run, step, value in [("a", 1, 0.1), ("a", 2, 0.5), ("b", 3, 3.0), ("b", 4, 2.0)]:
        store.save({"a": np.zeros(1)}, {}, step, facts={**scored(value), "run": run})
        store.prune(1)
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    best = store.best("val_loss", "min", "b")
    assert best is not None
    assert best.step == 4


def test_the_best_stays_when_the_run_continues_with_another_metric_or_none(tmp_path) -> None:
    store = Store(tmp_path)
    for step, value in enumerate([3.0, 1.0, 2.0], start=1):
        save(store, step, value)
    for step, value in enumerate([0.7, 0.9, 0.8], start=4):
        store.save({"a": np.zeros(1)}, {}, step, facts=scored(value, "val_auc", "max"))
        store.prune(2)
    for step in (7, 8):
        save(store, step)
        store.prune(2)
    assert [entry.step for entry in store.entries()] == [8, 7, 5, 2]


def test_the_same_step_again_replaces(tmp_path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    store.save({"a": np.zeros(1)}, {"again": True}, 1)
    (entry,) = store.entries()
    assert entry.serial == 2
    assert names(tmp_path) == ["step-00000001"]


def test_damaged_ones_are_left_for_a_person(tmp_path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    store.prune(1)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    damaged, good = store.entries()
    assert damaged.problem is not None
    assert good.step == 3
    assert store.latest() == good


def test_killed_while_pruning(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        save(store, step)

    def die(at: str, path: Path) -> None:
        if at == "while pruning":
            raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "fault_point", die)
    with pytest.raises(KeyboardInterrupt):
        store.prune(1)
    assert [entry.step for entry in store.entries()] == [2]
    store.sweep()
    assert names(tmp_path) == ["step-00000002"]


def test_sweep_puts_back_what_was_being_replaced(tmp_path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    (tmp_path / ".step-00000009.tmp-123").mkdir()
    (tmp_path / "something else").mkdir()
    store.sweep()
    assert names(tmp_path) == ["something else", "step-00000001"]
    assert Store(tmp_path / "nowhere").entries() == []
    Store(tmp_path / "nowhere").sweep()


def test_links_and_other_names_are_no_checkpoints(tmp_path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000002").symlink_to(tmp_path / "step-00000001")
    (tmp_path / "step-3").mkdir()
    assert [entry.step for entry in store.entries()] == [1]
