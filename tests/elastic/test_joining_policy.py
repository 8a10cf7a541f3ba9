"""Numbers of joining ranks: no two processes of a launch have the same one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ktrainer.config import WorldConfig
from ktrainer.elastic import joining_policy
from ktrainer.elastic.joining_policy import JoiningPolicy
from tests.faults.test_healing import launch

# Rank 2 is lost; then rank 0, once a replacement has started and ended before it could join.
LOSES = """
import os, signal, time
from pathlib import Path

started = Path(__file__).with_name("started")
if number := os.environ.get("KTRAINER_STABLE_RANK"):
    with started.open("a") as file:
        file.write(number + "\\n")
    time.sleep(0.5)  # else rank 0 may start another before it sees this one's number
    os._exit(0)

import keras, numpy as np
from ktrainer import Callback, Trainer
from ktrainer import dataparallel as hvd

def has_started(number):
    return started.exists() and str(number) in started.read_text().split()

def after(step, rank):
    time.sleep(0.02 if step < 3 else 0.2)  # then a start is waited for
    if (rank == 2 and step == 2) or (rank == 0 and has_started(3)):
        os.kill(os.getpid(), signal.SIGKILL)
"""
FIT = """
class Loses(Callback):
    def on_step_end(self, step, logs=None):
        after(step, self.world.stable_rank)
        self.model.stop_training = has_started(5)

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.ones((12, 2), "float32")
Trainer.from_cli(callbacks=[Loses()]).fit(build, (x, x[:, :1]))
"""
LOOP = """
hvd.init(deadline=20)
rank = hvd.rank()

@hvd.elastic.run
def train(state):
    while state.step < 800 and not has_started(5):
        state.step += 1
        after(state.step, rank)
        state.commit()

train(hvd.elastic.ObjectState(step=0))
"""


def test_a_number_that_no_rank_has_heard_of_is_not_given_again(monkeypatch: Any) -> None:
    """Rank 0 starts a process and is lost; so does rank 1, when it is the first."""
    given: list[int] = []
    monkeypatch.setattr(joining_policy, "SpawnedRank", lambda rank, *_, **__: given.append(rank))
    monkeypatch.setattr(joining_policy, "free_local_rank", lambda world: 0)
    members = [SimpleNamespace(stable_rank=rank) for rank in range(3)]
    config = WorldConfig(max_size=9)

    def policy(rank: int) -> JoiningPolicy:
        settings = {"nominal_size": 3, "trained": False, "bucket_sizes": None}
        world = SimpleNamespace(size=3, members=members, is_root=rank == 0, **settings)
        return JoiningPolicy(cast(Any, world), config)

    policies = [policy(rank) for rank in range(3)]
    policies[0].look()
    for first in (1, 2):
        for rank in range(first, 3):
            world: Any = policies[rank].world
            world.size, world.members, world.is_root = 3 - first, members[first:], rank == first
            policies[rank].learn(3)
        policies[first].look()
    assert given == [3, 4, 5]


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", [FIT, LOOP], ids=["fit", "loop"])
def test_a_new_first_rank_gives_no_number_twice(tmp_path: Path, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSES + text)
    words = ["backend=data_parallel", "data.batch_size=12", "trainer.epochs=800"]
    words += ["logging.progress=none", f"run.dir={tmp_path / 'run'}"]
    named = ("--replace", "-n", "3", "--timeout", "120", str(script))
    done = launch(tmp_path, *named, *(words if text == FIT else ()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "started").read_text().split() == ["3", "5"]
