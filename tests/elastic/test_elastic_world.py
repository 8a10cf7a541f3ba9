"""A world that heals, without a training: usable again after healing, refused after a deadline in
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_healing import launch

START = """
import os, signal, sys, time
from pathlib import Path
from ktrainer.errors import DeadlineExceeded, PeerLost, WorldError
from ktrainer.distributed import open_world
from ktrainer.distributed.launcher_events import report_phase

case = sys.argv[1]
world = open_world(heal=True)
report_phase(1, range(3))
if case in ("killed", "stopped"):
    import numpy as np
    from ktrainer import Trainer  # the script trains by itself
    from ktrainer.distributed.mpi_gradients import MpiGradients
    sums = MpiGradients(world)
opened = [Path(__file__).with_name(f"opened-{rank}") for rank in range(3)]
opened[world.rank].touch()
end = time.monotonic() + 30
while not all(path.exists() for path in opened):
    assert time.monotonic() < end, "the others have not opened the world"
    time.sleep(0.01)
world.deadline = 20.0
if case == "stopped":
    world.deadline = 3.0
    type(world).answer_seconds = 2.5  # instead of a quarter of 3: the machine may be busy
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP if case == "stopped" else signal.SIGKILL)
"""

HEALS = """
try:
    world.barrier("a meeting")
except PeerLost as error:
    assert world.has_lost(error)
    world.record_interruption(error)  # MPI may have ended the request, or not
world.deadline = 20.0
try:
    world.barrier("before healing")
except Exception as error:
    assert world.has_lost(error), error
try:
    sums.reduce_in_place([np.ones(2)], 1.0)  # no error of TensorFlow's takes it from `sums`
except Exception as error:
    assert world.has_lost(error), error
(lost,) = world.heal()
assert sums.failure(ValueError("of the user's later on")) is None
assert lost.stable_rank == 2
assert world.interrupted_by is None
assert not world.broken
print(world.oob_allreduce(world.rank + 1.0, "sum"), world.allgather(world.rank), flush=True)
report_phase(2, range(2))
"""

LATE = """
def stay_away(*_):
    time.sleep(60)

if world.rank == 1:
    setattr(world, case, stay_away)
try:
    world.barrier("a meeting")
except PeerLost as error:  # all that follows has this context
    world.record_interruption(error)
    world.deadline = 2.0
    try:
        world.heal()
    except DeadlineExceeded as late:
        print(late.operation, world.has_lost(late), flush=True)
        for use in (lambda: world.comm, world.duplicate, world.heal, lambda: world.agree("more")):
            try:
                use()
            except WorldError as refused:
                print(refused, refused.__cause__ is late, world.has_lost(refused), flush=True)
os._exit(3)
"""


@pytest.mark.parametrize("case", ["killed", "stopped"])
def test_after_healing_the_world_is_as_new(tmp_path: Path, case: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + HEALS)
    words = ("--no-prefix", "--timeout", "60", str(script), case)
    done = launch(tmp_path, "--heal", "-n", "3", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["3.0 [0, 1]"] * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("stays_away", "operation"),
    [
        ("heal", "agree on the surviving ranks"),
        ("_shrunk", "shrink the world"),
        ("_open", "reopen the world"),
    ],
)
def test_after_a_deadline_in_healing_a_rank_can_no_longer_communicate(
    tmp_path: Path, stays_away: str, operation: str
) -> None:
    """The others may be in that operation still, over communicators that are not revoked."""
    script = tmp_path / "script.py"
    script.write_text(START + LATE)
    words = ("--no-prefix", "--timeout", "60", str(script), stays_away)
    done = launch(tmp_path, "--heal", "-n", "3", *words, warm=False)
    assert done.returncode == 3, done.stdout + done.stderr
    late, *refused = done.stdout.splitlines()
    assert late == f"{operation} False"
    assert len(refused) == 4
    for said in refused:
        assert "can no longer communicate" in said
        assert said.endswith("True False")
