"""Row 9: with `--heal` too, a rank lost outside of `fit` ends the launch, which names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_healing import launch

# What the rank has forked keeps its pipes open.
EARLY = """
import os, signal, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and os.environ["KTRAINER_RESTART"] == "0":
    if not os.fork():
        time.sleep(60)
        os._exit(0)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
from ktrainer import distributed as world
print(world.current_world().size)
"""

MODEL = """
import os, signal, time
from pathlib import Path
import keras, numpy as np
from ktrainer import Callback, Trainer

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model
"""

LATE = """

class Dies(Callback):
    def on_step_end(self, step, logs=None):
        if self.world.rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = Trainer.from_cli(callbacks=[Dies()])
trainer.fit(build, (np.zeros((60, 6), "float32"), np.zeros((60, 3), "float32")))
print("trained", flush=True)
printed = Path(__file__).with_name("printed")
if trainer.world.rank == 1:
    printed.touch()
if trainer.world.rank == 0:
    while not printed.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)  # as where it has too little memory to evaluate
"""


def test_a_rank_lost_before_the_start_ends_all_and_they_restart(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EARLY)
    again = ("--max-restarts", "1", "--backoff", "0.1", "--timeout", "60")
    done = launch(tmp_path, "--heal", "-n", "2", *again, str(script), warm=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[ 0] 2", "[ 1] 2"]
    assert "rank 1 was killed" in done.stderr
    assert "before the first step of fit or after its end" in done.stderr


@pytest.mark.exhaustive
def test_a_rank_lost_after_fit_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MODEL + LATE)
    words = ("backend=data_parallel", "data.batch_size=12", "logging.progress=none")
    done = launch(tmp_path, "--heal", "-n", "3", "--timeout", "100", str(script), *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[ 0] trained", "[ 1] trained"]
    healed, last = done.stderr.splitlines()
    assert "rank 2 was lost; 2 ranks continue after step" in healed
    assert "ktrainer run: rank 0 was killed" in last


NAMES = """
import os, signal, threading, time
from pathlib import Path
from ktrainer.distributed import stack_dump
from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.distributed.launcher_events import report_phase
from ktrainer.distributed import open_world

def lost_in_thought():
    threading.Event().wait(60)

stack_dump._SECONDS = 20.0  # for an answer
world = open_world(heal=True)
report_phase(1, range(3))
opened = [Path(__file__).with_name(f"opened-{rank}") for rank in range(3)]
opened[world.rank].touch()
if world.rank == 2:
    while not all(path.exists() for path in opened):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 1:
    lost_in_thought()
world.deadline = 10.0
try:
    world.barrier("a meeting")
except PeerLost as error:
    print(error, flush=True)
world.deadline = 1.0
try:
    world.heal()
except DeadlineExceeded as error:
    print(error, flush=True)
os._exit(3)
"""


def test_errors_name_lost_ranks_and_missing_ones(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMES)
    words = ("--heal", "-n", "3", "--no-prefix", "--timeout", "60", str(script))
    done = launch(tmp_path, *words, warm=False)
    assert done.returncode == 3, done.stdout + done.stderr
    lost, late, *where = done.stdout.splitlines()
    assert lost.startswith("rank 0 lost rank 2 at step 0 in 'a meeting': ")
    assert "rank 0 waited 1 s at step 0 in 'agree on the surviving ranks'" in late
    assert "Lost: process 2. Expected: process 1, by their ranks at the start." in late
    assert where[0].startswith("process 1 (process ")
    assert any('script.py", line 10 in lost_in_thought' in line for line in where)
