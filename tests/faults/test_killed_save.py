"""Rows 1 and 2: a save that is killed at any point."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktrainer.checkpoint.format.checkpoint_folder as format_module
import ktrainer.checkpoint.format.checkpoint_store as store_module
from ktrainer.checkpoint import read_checkpoint, resume, verify
from ktrainer.checkpoint.background_writer import BackgroundWriter
from ktrainer.checkpoint.contents.run_snapshot import Snapshot
from ktrainer.checkpoint.format.checkpoint_reader import read_manifest
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.checkpoint.format.value_encoding import encode_json
from ktrainer.distributed import SingleWorld
from tests.checkpoint.stages import same, values, whole_model
from tests.checkpoint.whole import write_checkpoint
from tests.dist.harness import RankLost
from tests.faults.runs import CASES, killed_after, train
from tests.faults.stages import save_with_fault
from tests.faults.test_resume import differences

# Row 1


def save_and_die(directory: Path, source: Path, model: Any, nth: int) -> bool:
    """Save what is in `source` as one more checkpoint, behind the steps and as the best one, in a
    process that is killed at the `nth` point of that; returns whether there was one."""
    arrays, state = read_checkpoint(source)
    manifest = read_manifest(source)
    facts = {"run": manifest["run"], "metric": {"name": "val_loss", "value": 0.5, "mode": "min"}}
    step = state["progress"]["step"]
    snapshot = Snapshot(step, arrays, encode_json(state), list(arrays), facts)
    child = os.fork()
    if child == 0:
        count = iter(range(1000))

        def fault_point(at: str, path: Path) -> None:
            if next(count) == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        format_module.fault_point = store_module.fault_point = fault_point
        saver = BackgroundWriter(directory, model, SingleWorld(), asynchronous=True)
        saver.save(snapshot, lambda store: store.prune(2))
        saver.wait()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_row_01_killed_at_every_point_of_a_save(tmp_path: Path) -> None:
    """Killed while it saves step 4, or saves it again, the run resumes from 3 or 4 to the bit."""
    case = CASES["callbacks"]
    whole = train(tmp_path / "whole", case)
    source, model = tmp_path / "whole" / "checkpoints" / "step-00000004", case.model()
    # Files, manifest, renames, and pruning or replacing; it resumes from the midst, and the end.
    for last, points, resumes_after in ((3, 14, 6), (4, 13, 12)):
        for nth in range(points + 1):
            folder = killed_after(tmp_path / "whole", tmp_path / f"killed-{last}-{nth}", last)
            directory = folder / "checkpoints"
            assert save_and_die(directory, source, model, nth) == (nth < points), nth
            latest = Store(directory).latest()
            assert latest is not None
            assert latest.step in ((3, 4) if nth < points - 1 else (4,))  # as it prunes, 4 is there
            assert verify(latest.path) == []
            if nth == resumes_after:
                assert not differences(train(folder, case), whole), nth
                assert not [p.name for p in directory.iterdir() if p.name.startswith(".")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rank", "fault"), [(1, "dies at a file"), (0, "dies at the rename")])
def test_row_01_killed_stage(ranks, tmp_path, rank: int, fault: str) -> None:
    """A run resumes from the checkpoint before; the rest of the new one is cleared up."""
    with pytest.raises(RankLost, match=r"(is|are) lost"):
        ranks(2, "killed").run(save_with_fault, str(tmp_path), 2, rank, fault)
    store = Store(tmp_path)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    model = whole_model(seed=7)
    progress = resume("auto", tmp_path, model=model, world=SingleWorld())
    assert progress is not None
    assert progress.step == 1
    expected = {n: v for n, v in values(whole_model()).items() if "seed" not in n}
    same(expected, values(model))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    store.sweep()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]


# Row 2


def _name(path: str) -> str:
    name = Path(path).name
    return "temporary folder" if name.startswith(".c.tmp-") else name


def test_row_02_order_of_flushing(tmp_path, monkeypatch) -> None:
    """Files, manifest, folder, rename, parent: then a crash loses nothing that was announced."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (
            events.append("fsync " + _name(os.readlink(f"/proc/self/fd/{fd}"))),
            fsync(fd),
        ),
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write_checkpoint(tmp_path / "c", {"a": np.ones(3)}, {})
    assert events == [
        "fsync arrays-00001.safetensors",
        "fsync state.json",
        "fsync manifest.json",
        "fsync temporary folder",
        "rename",
        f"fsync {tmp_path.name}",
    ]
