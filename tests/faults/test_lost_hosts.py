"""A host is lost: the others heal, or the launch restarts on them, or ends and names the host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
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
from tests.processes import ktrainer, warm_python_on

TRAINS = """
import json, os, pathlib, time
import keras, numpy as np
from ktrainer import Callback, Trainer

planted = pathlib.Path(__file__).with_name("PLANTED")

class Wait(Callback):
    waited = again = False

    def on_step_begin(self, step):
        first = os.environ["KTRAINER_RESTART"] == "0"
        if first and self.world.size > 1 and step == 3 and not self.waited:
            self.waited = True
            print("now", flush=True)
            for _ in range(400):
                if planted.exists():
                    break
                time.sleep(0.05)
        if not first and not self.again:
            print("again from", step, flush=True)
            self.again = True

    def on_step_end(self, step, logs=None):
        print("updated", step, "at", time.time(), flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0")))

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return model

keras.config.set_floatx("float64")
trainer = Trainer.from_cli(callbacks=[Wait()], defaults={"seed": 1})
x = np.random.default_rng(0).normal(size=(64, 6))
history = trainer.fit(build, (x, x[:, :3])).history
path = f"found-{os.environ['KTRAINER_RESTART']}-{trainer.world.size}.keras"
trainer.save(path)
if trainer.world.is_root:
    model = keras.models.load_model(path)
    found = [history["loss"], *(v.numpy().tolist() for v in model.variables)]
    print("hash seed", os.environ.get("PYTHONHASHSEED"), flush=True)
    print("found", trainer.world.size, json.dumps(found), flush=True)
"""
PLANTED = "PLANTED"  # the file that tells the ranks that the fault is there: they wait for it
WORDS = ("backend=data_parallel", "data.batch=global", "data.batch_size=16", "trainer.epochs=2")
MIRRORED = ("backend=tf_distribute", "backend.strategy=multi_worker_mirrored")
MORE = ("logging.progress=none", "checkpoint.every=1ba", "world.deadline=8")
LAUNCH = ("-m", "ktrainer.cli.main", "launch", "--all-ranks")
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


def start(
    made: Hosts, folder: Path, *options: object, slots: int = 1, warm: bool = False
) -> subprocess.Popen[str]:
    """A launch over all hosts from the first one, once it is in the step to be interrupted.

    Its ranks need not import TensorFlow, unless they are to be found among a host's processes.
    """
    script = folder / "script.py"
    script.write_text(TRAINS)
    hosts = ",".join(f"{name}:{slots}" for name in made.names)
    keys = [str(option) for option in options if "=" in str(option)]
    named = [str(option) for option in options if "=" not in str(option)]
    words = ("--hosts", hosts, "--rsh", made.network_agent, *named, script)
    more = (*WORDS, *MORE, f"run.dir={folder / 'lost'}", *keys)
    python = warm_python_on(made, **ENV) if warm else sys.executable
    launcher = made.start(0, python, *LAUNCH, *words, *more, env=ENV, cwd=folder)
    assert launcher.stdout is not None
    assert any("now" in line for line in launcher.stdout), launcher.communicate(timeout=60)
    return launcher


def lose(
    made: Hosts, how: str, folder: Path, *options: object, slots: int = 1, warm: bool = True
) -> Lost:
    """Lose the last host in mid-step: how the launch on the others ends, and what it says."""
    launcher = start(made, folder, *options, slots=slots, warm=warm)
    last = len(made.names) - 1
    began = time.monotonic()
    if how == "stopped":
        for pid in ranks_on(made, last):
            os.kill(pid, signal.SIGSTOP)
    else:
        {"killed": made.kill, "cut": made.cut}[how](last)
    if how == "cut":
        time.sleep(4)  # the launcher, too, is to notice before training ends: after 6 s of silence
    (folder / PLANTED).touch()
    out, errors = launcher.communicate(timeout=150)
    reap_adopted()  # agents of the lost host, which this process inherits from the launcher
    return Lost(launcher.returncode, out, errors, time.monotonic() - began)


def ranks_on(made: Hosts, host: int) -> list[int]:
    """Process ids of the ranks on a host."""
    found = []
    for pid in made.pids(host):
        with contextlib.suppress(OSError):
            if "ktrainer.launch.rank_process" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def assert_equals_one_process(values: list[np.ndarray], folder: Path) -> None:
    """Compare losses and weights with those of one process that nothing disturbs."""
    for one, other in zip(values, one_process(folder / "script.py"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


_ALONE: list[np.ndarray] = []


def one_process(script: Path) -> list[np.ndarray]:
    """Losses and weights of the script, which is always the same; it runs once a session."""
    if not _ALONE:
        words = ("launch", "--all-ranks", script, *WORDS, *MORE[:1])
        alone = ktrainer(*words, cwd=script.parent, seconds=90)
        assert alone.returncode == 0, alone.stderr
        _ALONE.extend(found(alone.stdout)[1])
    return _ALONE


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["cut", "stopped"])
def test_the_ranks_of_other_hosts_heal(
    hosts: Callable[[int], Hosts], tmp_path: Path, how: str
) -> None:
    """With the numbers of one process. A host that was cut off ends its ranks, and says why."""
    made = hosts(3)
    lost = lose(made, how, tmp_path, "--heal", warm=False)
    assert lost.code == 0, lost.errors
    assert "rank 2 was lost; 2 ranks continue after step" in lost.errors
    assert (f"host {made.names[2]} was lost, with rank 2" in lost.errors) == (how == "cut")
    size, values = found(lost.out)
    assert size == 2
    assert_equals_one_process(values, tmp_path)
    if how == "cut":
        (log,) = made.folder.glob("*/tmp/ktrainer-*-lost-launcher.log")
        assert made.names[2] in log.name
        assert "has lost the launcher: nothing was heard from it for 6 s" in log.read_text()
        assert not ranks_on(made, 2)


@pytest.mark.exhaustive
def test_two_ranks_of_a_lost_host(hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Sums are hierarchical before, and not after."""
    made = hosts(2)
    lost = lose(made, "killed", tmp_path, "--heal", slots=2)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with ranks 2, 3" in lost.errors
    assert "ranks 2, 3 were lost; 2 ranks continue after step" in lost.errors
    assert_equals_one_process(found(lost.out)[1], tmp_path)


@pytest.mark.exhaustive
def test_ranks_save_and_end_when_the_launcher_is_lost(
    hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """With its host, and rank 0. Started on the others, the run resumes from there."""
    made = hosts(3)
    launcher = start(made, tmp_path, "--heal")
    made.kill(0)
    (tmp_path / PLANTED).touch()
    launcher.communicate(timeout=20)
    deadline = time.monotonic() + 40
    while ranks_on(made, 1) or ranks_on(made, 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name in made.names[1:]:
        (log,) = made.folder.glob(f"{name}/tmp/*-lost-launcher.log")
        text = log.read_text()
        assert "has lost the launcher: the connection was closed" in text
        assert re.search(r"ended with exit code 75: .*checkpoint .*/step-0000000[34];", text), text
    others = ("--hosts", ",".join(made.names[1:]), "--rsh", made.network_agent)
    words = (sys.executable, *LAUNCH, "--heal", *others)
    more = (*WORDS, *MORE, f"run.dir={tmp_path / 'lost'}", "checkpoint.resume=auto")
    done = made.run(1, *words, tmp_path / "script.py", *more, env=ENV, cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "updated 3 " not in done.stdout
    assert_equals_one_process(found(done.stdout)[1], tmp_path)


@pytest.mark.exhaustive
def test_a_replicated_pipeline_restarts_from_its_last_update(
    hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """On the other host, which has a replica of each stage; no checkpoint was due before."""
    made = hosts(2)
    words = ("--heal", "--max-restarts", 2, "backend=pipeline", "backend.partitions=2")
    lost = lose(made, "killed", tmp_path, *words, "checkpoint.every=null", slots=2)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with ranks 2, 3" in lost.errors
    assert "again from 3\n" in lost.out
    size, values = found(lost.out)
    assert size == 2
    assert_equals_one_process(values, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "words"),
    [("cut", ()), ("killed", MIRRORED)],
    ids=["cut", "killed-mirrored"],
)
def test_a_launch_restarts_on_the_other_hosts(
    hosts: Callable[[int], Hosts], tmp_path: Path, how: str, words: tuple[str, ...]
) -> None:
    """With the numbers of one process: each example once, the interrupted update again."""
    made = hosts(2)
    lost = lose(made, how, tmp_path, "--max-restarts", 2, *words)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with rank 1" in lost.errors
    # The checkpoint before the interrupted update may still have been on its way to the disk.
    assert re.search(r"\[0\] again from [23]\n", lost.out)
    assert "[0] hash seed 0\n" in lost.out, "sets must iterate as they did before the loss"
    size, values = found(lost.out)
    assert size == 1
    assert_equals_one_process(values, tmp_path)


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
