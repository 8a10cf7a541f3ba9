"""Row 9: with `--heal` too, a death where nobody heals it ends the launch, which names the rank."""

from __future__ import annotations

from pathlib import Path

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
from ktrainer import world
print(world.current().size)
"""

LATE = """
import os, signal, time
import keras, numpy as np
from ktrainer import Callback, Trainer

class Dies(Callback):
    def on_step_end(self, step, logs=None):
        if self.world.rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Dies()])
trainer.fit(build, (np.zeros((60, 6), "float32"), np.zeros((60, 3), "float32")))
print("trained", flush=True)
if trainer.world.rank == 0:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)  # as where it has too little memory to evaluate
"""


def test_a_rank_that_dies_before_the_start_ends_all_and_they_start_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EARLY)
    again = ("--max-restarts", "1", "--backoff", "0.1", "--timeout", "60")
    done = launch(tmp_path, "--heal", "-n", "2", *again, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[ 0] 2", "[ 1] 2"]
    assert "rank 1 was killed" in done.stderr
    assert "before the first step of fit or after its end" in done.stderr


def test_a_rank_that_dies_after_fit_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LATE)
    words = ("backend=data_parallel", "data.batch_size=12", "logging.progress=none")
    done = launch(tmp_path, "--heal", "-n", "3", "--timeout", "100", str(script), *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[ 0] trained", "[ 1] trained"]
    healed, last = done.stderr.splitlines()
    assert "rank 2 died; 2 ranks go on after step" in healed
    assert "ktrainer launch: rank 0 was killed" in last
