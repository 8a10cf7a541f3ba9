"""A host is lost: the launch restarts on those that are left, or ends and names it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ktrainer.launch.process_tree import reap_adopted
from tests.dist.harness.group import ROOT
from tests.dist.harness.hosts import Hosts

TRAINS = """
import json, os, time
import keras, numpy as np
from ktrainer import Callback, Trainer

class Wait(Callback):
    again = False

    def on_step_begin(self, step):
        if os.environ["KTRAINER_RESTART"] == "0" and self.world.size > 1 and step == 3:
            print("now", flush=True)
            time.sleep(4)
        if os.environ["KTRAINER_RESTART"] == "1" and not self.again:
            print("again from", step, flush=True)
            self.again = True

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return model

keras.config.set_floatx("float64")
trainer = Trainer.from_cli(callbacks=[Wait()], defaults={"seed": 1})
x = np.random.default_rng(0).normal(size=(64, 6))
history = trainer.fit(build, (x, x[:, :3])).history
if trainer.world.is_root:
    found = [history["loss"], *(v.numpy().tolist() for v in trainer.model.variables)]
    print("hash seed", os.environ.get("PYTHONHASHSEED"), flush=True)
    print("found", trainer.world.size, json.dumps(found), flush=True)
"""
WORDS = ("backend=data_parallel", "data.batch=global", "data.batch_size=16", "trainer.epochs=2")
MORE = ("logging.progress=none", "checkpoint.every=1ba", "world.deadline=8")
LAUNCH = (sys.executable, "-m", "ktrainer.cli.main", "launch", "--all-ranks")
ENV = {"PYTHONPATH": str(ROOT)}


@dataclass
class Lost:
    """The end of a launch that lost a host, after so many seconds."""

    code: int
    out: str
    errors: str
    seconds: float


def found(text: str) -> tuple[int, list[np.ndarray]]:
    """World size at the end, losses and weights."""
    line = next(line for line in text.splitlines() if " found " in f" {line}")
    size, _, values = line.partition("found ")[2].partition(" ")
    return int(size), [np.asarray(value) for value in json.loads(values)]


def lose(made: Hosts, how: str, folder: Path, *options: object) -> Lost:
    """Lose the second host in mid-step: how the launch on the first one ends, and what it says."""
    script = folder / "script.py"
    script.write_text(TRAINS)
    words = ("--hosts", ",".join(made.names), "--rsh", made.agent, *options, script)
    more = (*WORDS, *MORE, f"run.dir={folder / 'lost'}")
    launcher = made.start(0, *LAUNCH, *words, *more, env=ENV, cwd=folder)
    assert launcher.stdout is not None
    assert any("now" in line for line in launcher.stdout), launcher.communicate(timeout=60)
    began = time.monotonic()
    {"killed": made.kill, "cut": made.cut}[how](1)
    out, errors = launcher.communicate(timeout=150)
    reap_adopted()  # agents of the lost host, which this process inherits from the launcher
    return Lost(launcher.returncode, out, errors, time.monotonic() - began)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_the_run_continues_on_the_hosts_that_are_left(
    hosts: Callable[[int], Hosts], tmp_path: Path, how: str
) -> None:
    """With the numbers of one process: each example once, the interrupted update again."""
    made = hosts(2)
    lost = lose(made, how, tmp_path, "--max-restarts", 2)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with rank 1" in lost.errors
    # The checkpoint before the interrupted update may still have been on its way to the disk.
    assert re.search(r"\[0\] again from [23]\n", lost.out)
    assert "[0] hash seed 0\n" in lost.out, "sets must iterate as they did before the loss"
    size, values = found(lost.out)
    assert size == 1
    words = (*LAUNCH, tmp_path / "script.py", *WORDS, *MORE[:1])
    alone = subprocess.run(
        list(map(str, words)), cwd=tmp_path, capture_output=True, text=True, timeout=90, check=True
    )
    for one, other in zip(values, found(alone.stdout)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
def test_without_restarts_the_error_names_the_host(
    hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """In the last line."""
    made = hosts(2)
    lost = lose(made, "killed", tmp_path)
    assert lost.code != 0
    last = lost.errors.strip().splitlines()[-1]
    assert f"host {made.names[1]} was lost, with rank 1" in last, lost.errors
