"""A host is lost: the others heal, or the launch restarts on them, or ends and names the host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
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

with open("/proc/self/comm", "w") as name:
    name.write("a rank")

def planted(number):
    return pathlib.Path(__file__).with_name(f"PLANTED-{number}").exists()

class Wait(Callback):
    waited, again = 0, False

    def on_step_begin(self, step):
        first = os.environ["KTRAINER_RESTART"] == "0"
        due = step == 3 + 2 * self.waited and (self.waited == 0 or planted(self.waited))
        if first and self.world.size > 1 and due:
            self.waited += 1
            print("now", self.waited, flush=True)
            for _ in range(400):
                if planted(self.waited):
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
for _ in range(1200):
    if not pathlib.Path(__file__).with_name("HOLD").exists():
        break
    time.sleep(0.05)
path = f"found-{os.environ['KTRAINER_RESTART']}-{trainer.world.size}.keras"
trainer.save(path)
if trainer.world.is_root:
    model = keras.models.load_model(path)
    found = [history["loss"], *(v.numpy().tolist() for v in model.variables)]
    print("hash seed", os.environ.get("PYTHONHASHSEED"), flush=True)
    print("found", trainer.world.size, json.dumps(found), flush=True)
"""
WAITS = """
import time
from ktrainer.distributed import open_world

world = open_world()
print("now 1", flush=True)
world.barrier("a meeting") if world.is_root else time.sleep(60)
"""
PLANTED = ("PLANTED-1", "PLANTED-2", "PLANTED-3")  # they tell ranks that wait: a fault is there
WORDS = ("backend=data_parallel", "data.batch=global", "data.batch_size=16", "trainer.epochs=2")
MIRRORED = ("backend=tf_distribute", "backend.strategy=multi_worker_mirrored")
MORE = ("logging.progress=none", "checkpoint.every=1ba", "world.deadline=8")
LAUNCH = ("-m", "ktrainer.cli.main", "launch", "--all-ranks")
Lose = Callable[[Hosts, int], None]
ENV = {"PYTHONPATH": str(ROOT)}


@dataclass
class Lost:
    """The end of a launch that lost a host."""

    code: int
    out: str
    errors: str


def found(text: str) -> tuple[int, list[np.ndarray]]:
    """World size at the end, losses and weights."""
    line = next(line for line in text.splitlines() if " found " in f" {line}")
    size, _, values = line.partition("found ")[2].partition(" ")
    return int(size), [np.asarray(value) for value in json.loads(values)]


def start(
    made: Hosts,
    folder: Path,
    *options: object,
    slots: Sequence[int] = (),
    text: str = TRAINS,
) -> subprocess.Popen[str]:
    """A launch over all hosts from the first one, once it is in the step to be interrupted."""
    script = folder / "script.py"
    script.write_text(text)
    each = zip(made.names, slots or [1] * len(made.names), strict=True)
    hosts = ",".join(f"{name}:{count}" for name, count in each)
    keys = [str(option) for option in options if "=" in str(option)]
    named = [str(option) for option in options if "=" not in str(option)]
    words = ("--hosts", hosts, "--rsh", made.network_agent, *named, script)
    more = (*WORDS, *MORE, f"run.dir={folder / 'lost'}", *keys)
    python = warm_python_on(made, **ENV)
    launcher = made.start(0, python, *LAUNCH, *words, *more, env=ENV, cwd=folder)
    wait_for(launcher, "now 1")
    return launcher


def wait_for(launcher: subprocess.Popen[str], text: str) -> None:
    """Return once a rank prints it."""
    assert launcher.stdout is not None
    assert any(text in line for line in launcher.stdout), launcher.communicate(timeout=60)


def errors_until(launcher: subprocess.Popen[str], text: str) -> str:
    """The errors of a launch until they say it; `communicate` returns those that follow."""
    assert launcher.stderr is not None
    errors = b""
    while text.encode() not in errors:
        more = os.read(launcher.stderr.fileno(), 1 << 16)
        assert more, errors.decode()
        errors += more
    return errors.decode()


def lose(
    made: Hosts, folder: Path, *options: object, slots: int = 1, how: Lose = Hosts.kill
) -> Lost:
    """Lose the second of two hosts in mid-step: how the launch on the other ends, what it says."""
    launcher = start(made, folder, *options, slots=(slots, slots))
    how(made, 1)
    (folder / PLANTED[0]).touch()
    return end_of(launcher)


def end_of(launcher: subprocess.Popen[str]) -> Lost:
    """How a launch ends that has lost a host."""
    out, errors = launcher.communicate(timeout=150)
    reap_adopted()  # agents of the lost host, which this process inherits from the launcher
    return Lost(launcher.returncode, out, errors)


def ranks_on(made: Hosts, host: int) -> list[int]:
    """Process ids of the ranks on a host, or of the stubs of those that are forks."""
    return _processes(made, host, "cmdline", "ktrainer.launch.rank_process")


def training_on(made: Hosts, host: int) -> list[int]:
    """Process ids of the ranks on a host that have begun `TRAINS`."""
    return _processes(made, host, "comm", "a rank\n")


def _processes(made: Hosts, host: int, file: str, text: str) -> list[int]:
    found = []
    for pid in made.pids(host):
        with contextlib.suppress(OSError):
            if text in Path(f"/proc/{pid}/{file}").read_text():
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Losses and weights of one process that nothing disturbs."""
    script = tmp_path_factory.mktemp("alone") / "script.py"
    script.write_text(TRAINS)
    words = ("launch", "--all-ranks", script, *WORDS, *MORE[:1])
    done = ktrainer(*words, cwd=script.parent, seconds=90)
    assert done.returncode == 0, done.stderr
    return found(done.stdout)[1]


def assert_same(values: list[np.ndarray], alone: list[np.ndarray]) -> None:
    """Losses and weights are equal but for rounding in float64."""
    for one, other in zip(values, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
def test_the_ranks_of_other_hosts_heal(
    hosts: Callable[[int], Hosts],
    tmp_path: Path,
    alone: list[np.ndarray],
    within: Callable[..., None],
) -> None:
    """First a rank is stopped; then a host is killed; then one with two ranks is cut off, whose
    ranks end and say why. Sums are hierarchical until then."""
    made = hosts(4)
    launcher = start(made, tmp_path, "--heal", slots=(1, 1, 1, 2))
    (stopped,) = training_on(made, 1)
    os.kill(stopped, signal.SIGSTOP)
    (tmp_path / PLANTED[0]).touch()
    wait_for(launcher, "now 2")
    made.kill(2)
    (tmp_path / PLANTED[1]).touch()
    wait_for(launcher, "now 3")
    hold = tmp_path / "HOLD"
    hold.touch()
    made.cut(3)
    time.sleep(4)  # so that its ranks have to end, after 6 s, long before they miss the others
    (tmp_path / PLANTED[2]).touch()
    errors = errors_until(launcher, f"host {made.names[3]} was lost")
    hold.unlink()  # the launcher, too, is to notice before the others end
    lost = end_of(launcher)
    lost.errors = errors + lost.errors
    assert lost.code == 0, lost.errors
    assert "rank 1 was lost; 4 ranks continue after step" in lost.errors
    assert "rank 1 was lost; 3 ranks continue after step" in lost.errors
    assert "ranks 1, 2 were lost; 1 rank continues after step" in lost.errors
    assert f"host {made.names[1]} was lost" not in lost.errors
    assert f"host {made.names[2]} was lost, with rank 2" in lost.errors
    assert f"host {made.names[3]} was lost, with ranks 3, 4" in lost.errors
    size, values = found(lost.out)
    assert size == 1
    assert_same(values, alone)
    (log,) = made.folder.glob("*/tmp/ktrainer-*-lost-launcher.log")
    assert made.names[3] in log.name
    assert "has lost the launcher: nothing was heard from it for 6 s" in log.read_text()
    for host in (1, 3):  # the launcher has ended the stopped rank
        within(20, lambda host=host: not ranks_on(made, host), "the end of its ranks")
        within(20, lambda host=host: not training_on(made, host), "the end of a fork that stopped")


@pytest.mark.exhaustive
def test_ranks_save_and_end_when_the_launcher_is_lost(
    hosts: Callable[[int], Hosts], tmp_path: Path, alone: list[np.ndarray]
) -> None:
    """With its host, and rank 0. The run resumes from there."""
    made = hosts(3)
    launcher = start(made, tmp_path, "--heal")
    made.kill(0)
    (tmp_path / PLANTED[0]).touch()
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
    words = (*WORDS, *MORE, f"run.dir={tmp_path / 'lost'}", "checkpoint.resume=auto")
    done = ktrainer("launch", "--all-ranks", tmp_path / "script.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "updated 3 " not in done.stdout
    assert_same(found(done.stdout)[1], alone)


@pytest.mark.exhaustive
def test_a_replicated_pipeline_restarts_from_its_last_update(
    hosts: Callable[[int], Hosts], tmp_path: Path, alone: list[np.ndarray]
) -> None:
    """On the other host, which has a replica of each stage; no checkpoint was due before."""
    made = hosts(2)
    words = ("--heal", "--max-restarts", 2, "backend=pipeline", "backend.partitions=2")
    lost = lose(made, tmp_path, *words, "checkpoint.every=null", slots=2, how=Hosts.cut)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with ranks 2, 3" in lost.errors
    assert "again from 3\n" in lost.out
    size, values = found(lost.out)
    assert size == 2
    assert_same(values, alone)


@pytest.mark.exhaustive
def test_a_launch_restarts_on_the_other_hosts(
    hosts: Callable[[int], Hosts], tmp_path: Path, alone: list[np.ndarray]
) -> None:
    """With the numbers of one process: each example once, the interrupted update again."""
    made = hosts(2)
    lost = lose(made, tmp_path, "--max-restarts", 2, *MIRRORED)
    assert lost.code == 0, lost.errors
    assert f"host {made.names[1]} was lost, with rank 1" in lost.errors
    # The checkpoint before the interrupted update may still have been on its way to the disk.
    assert re.search(r"\[0\] again from [23]\n", lost.out)
    assert "[0] hash seed 0\n" in lost.out, "sets must iterate as they did before the loss"
    size, values = found(lost.out)
    assert size == 1
    assert_same(values, alone)


@pytest.mark.exhaustive
def test_without_restarts_the_error_names_the_host(
    hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """In the last line."""
    made = hosts(2)
    launcher = start(made, tmp_path, text=WAITS)
    made.cut(1)
    lost = end_of(launcher)
    assert lost.code != 0
    last = lost.errors.strip().splitlines()[-1]
    assert f"host {made.names[1]} was lost, with rank 1" in last, lost.errors
