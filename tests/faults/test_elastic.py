"""`elastic.run`: ranks are lost and join, and the numbers stay those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import elastic_script
from tests.faults.test_healing import launch

SCRIPT = str(Path(elastic_script.__file__))


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Values and losses of one process, which loses nothing."""
    import ktrainer.dataparallel as hvd

    hvd.init()
    loop = elastic_script.Loop()
    hvd.elastic.run(lambda state: elastic_script.train(loop))(loop.state)
    found = elastic_script.result(loop)
    hvd.shutdown()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, other in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_lost_ranks(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """One in an all-reduce of a compiled step, and the first one in a commit."""
    faults = ["1:7:traced", "0:15:commit"]
    ended = launch(tmp_path, "--heal", "-n", "3", SCRIPT, "loop", str(tmp_path / "found"), *faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = json.loads((tmp_path / "found").read_text())
    compare(found, undisturbed)
    assert found["sizes"] == [3] * 6 + [2] * 9 + [1] * 9
    assert (found["resets"], found["traces"]) == ([2, 1, 1], 1)
    assert "rank 1 was lost; 2 ranks continue from the last commit" in ended.stderr
    assert "rank 0 was lost; 1 rank continues from the last commit" in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_joins_and_is_the_last_that_is_left(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """One is lost in a compiled step; one joins, between two commits; then the first is lost."""
    ended = launch(
        tmp_path,
        *(
            "--replace",
            "-n",
            "2",
            SCRIPT,
            "loop",
            str(tmp_path / "found"),
            "1:7:traced",
            "0:16:eager",
        ),
        JOINS_AT="13",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = json.loads((tmp_path / "found").read_text())
    compare(found, undisturbed)
    # From the commit of step 6, then, without one, at step 13, and from the commit of step 15.
    assert found["sizes"] == [2] * 6 + [1] * 7 + [2] * 2 + [1] * 9
    assert (found["resets"], found["traces"]) == ([1, 1], 1)
    assert "rank 1 was lost; 1 rank continues from the last commit" in ended.stderr
    assert "a rank joined; 2 ranks continue" in ended.stderr
    assert "no rank was lost; 1 rank continues from the last commit" in ended.stderr
    said = found["refused"]  # before it joined
    assert "allreduce (average): this process was started to join others" in said["early"]
    assert "Use size_op()" in said["traced size"]
    assert "join is not available" in said["join"]
    assert "process sets are not available" in said["process set"]
    assert said["numbers"] == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_fit(tmp_path: Path) -> None:
    """A rank is lost in an epoch, between two of `backward_passes_per_step`."""
    import ktrainer.dataparallel as hvd

    path = tmp_path / "found"
    ended = launch(tmp_path, "--heal", "-n", "2", SCRIPT, "fit", str(path), "1:9:batch")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 1 was lost; 1 rank continues" in ended.stderr
    (found,) = json.loads(path.read_text())
    hvd.init()
    fit = elastic_script.Fit()
    hvd.elastic.run(lambda state: fit.train(lambda where, step: None))(fit.state)
    expected = fit.result()
    hvd.shutdown()
    compare(found, expected)
    assert found["losses"] == [4, 0]
