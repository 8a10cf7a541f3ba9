"""`CheckpointManager` and `save_model`: a resumed loop, and plain Keras, have the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.dist.harness import Ranks
from tests.modelparallel import rank_functions


@pytest.mark.exhaustive
def test_a_resumed_loop_is_the_undisturbed_one(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """Restored before the first step, on two partitions and on three."""
    folder = str(tmp_path / "made" / "here")
    want = ranks(2).run(rank_functions.train, str(tmp_path / "none"), None, None)
    first = ranks(2).run(rank_functions.train, folder, 2, 2)
    assert first[0]["paths"] == [f"{folder}/ckpt-{k}" for k in (1, 2, 3)]
    assert first[0]["kept"] == first[1]["kept"] == first[0]["paths"][1:]
    assert sorted(p.name for p in Path(folder).iterdir()) == ["ckpt-2", "ckpt-3"]
    whole = {name: value for each in want for name, value in each["weights"].items()}
    for partitions in (2, 3):
        found = ranks(partitions).run(rank_functions.train, folder, None, None, partitions)
        for each in found:
            assert (each["restored"], each["step"]) == (f"{folder}/ckpt-3", 3)
            for name, value in each["weights"].items():
                np.testing.assert_allclose(value, whole[name], rtol=0, atol=1e-10, err_msg=name)
        assert {name for each in found for name in each["weights"]} == set(whole)


def test_what_a_script_sets_after_a_restore_stays(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    """And a checkpoint that does not fit one stage changes no other."""
    for found in ranks(2).run(rank_functions.set_after_restoring, str(tmp_path)):
        assert found["restored"] == (0.01, 1, 1)
        assert found["after"] == (0.5, 2, 3)
        assert "model/net/second/kernel [4, 1] instead of [4, 2]" in found["said"]
        assert found["same"]


def test_the_checkpoint_just_saved_is_kept(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """In a folder with higher numbers, of an earlier run."""
    for found in ranks(1).run(rank_functions.numbered, str(tmp_path), [800, 900, 100, 50, None]):
        assert [Path(path).name for path in found["saved"]] == [
            f"ckpt-{number}" for number in (800, 900, 100, 50, 101)
        ]
        assert found["kept"] == found["saved"][-2:]
        assert (found["latest"], found["step"]) == (found["saved"][-1], 4)


def test_clocks_and_errors_of_reading_lose_none(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    for found in ranks(1).run(rank_functions.with_other_clocks, str(tmp_path)):
        assert [Path(path).name for path in found["kept"]] == ["ckpt-3", "ckpt-4"]
        assert [Path(path).name for path in found["all"]] == ["ckpt-4", "ckpt-5", "ckpt-6"]


def test_a_save_that_was_killed_loses_nothing(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """And leaves nothing once a later one has saved."""
    for found in ranks(1).run(rank_functions.killed, str(tmp_path)):
        assert found["found"] == (f"{tmp_path}/ckpt-0", f"{tmp_path}/ckpt-0", 7)
        assert "it has step of int32 instead of float32" in found["dtype"]
        assert found["kept"] == [f"{tmp_path}/ckpt-1"] * 2
        assert found["files"] == ["ckpt-1"]


def test_plain_keras_reads_the_whole_model(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    for early, ending in ranks(2).run(rank_functions.saved, str(tmp_path)):
        assert "has no variables yet" in early
        assert "does not end in .keras" in ending
    for distance in ranks(1).run(rank_functions.plain, str(tmp_path))[0]:
        assert distance < 1e-12
