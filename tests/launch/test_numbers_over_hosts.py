"""Over two hosts training has the numbers of one process, and listens on their network only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.dist.harness.group import ROOT, one_thread
from tests.dist.harness.hosts import Hosts, why_no_hosts
from tests.launch.conftest import launch_command
from tests.processes import script as run_script
from tests.processes import warm_python_on

SCRIPT = """
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from ktrainer import Trainer
import keras
import numpy as np

keras.config.set_floatx("float64")
x = np.random.default_rng(1).normal(size=(72, 6))  # the last batch is half a batch
y = np.tanh(x @ np.arange(6.0))[:, None]
backends = os.environ.get("BACKENDS", "").split(" then ")  # trained on one after the other

def build():
    layers = [keras.layers.Dense(8, activation="tanh", name="hidden")]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model

class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            ports = subprocess.run(["ss", "-ltnHp"], capture_output=True, text=True).stdout
            (folder / f"listening-{os.getpid()}-{os.uname().nodename}").write_text(ports)
            end = time.monotonic() + 40
            while "HOLD" in os.environ and not Path(os.environ["HOLD"]).exists():
                assert time.monotonic() < end, "the test has not looked"
                time.sleep(0.01)

for number, words in enumerate(backends):
    folder = Path(os.environ["RUN"], str(number))
    folder.mkdir(exist_ok=True)
    settings = {"seed": 7, "trainer": {"epochs": 2}, "data": {"batch_size": 16},
                "logging": {"progress": "none", "csv": False}, "run": {"dir": str(folder)}}
    with Trainer.from_cli(argv=[*sys.argv[1:], *words.split()], defaults=settings) as trainer:
        with trainer.scope():
            model = build()
        history = trainer.fit(model, (x, y), callbacks=[Look()], shuffle=False)
        predicted = trainer.predict(model, x)
        if trainer.world.is_root:
            values = {"loss": history.history["loss"], "predicted": np.asarray(predicted).tolist()}
            (folder / "numbers.json").write_text(json.dumps(values))
"""


@dataclass
class Case:
    """Ways to train over two hosts, in one launch.

    Attributes:
        backends: the words of each.
        imports: each rank imports TensorFlow, as those of users do.
    """

    backends: list[str]
    imports: bool = False


CASES = {
    "data parallel, pipeline": Case(
        [
            "backend=data_parallel backend.engine=mpi",
            "backend=pipeline backend.partitions=2 backend.microbatches=4",
        ],
        imports=True,
    ),
    "Horovod": Case(["backend=data_parallel backend.engine=horovod"]),
    "multi-worker mirrored": Case(["backend=tf_distribute backend.strategy=multi_worker_mirrored"]),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    """Two hosts for all tests of this file."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    made = Hosts(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The numbers of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(SCRIPT)
    done = run_script("script.py", cwd=folder, seconds=90, RUN=str(folder), **one_thread())
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / "0" / "numbers.json").read_text()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.horovod if n == "Horovod" else ()) for n in CASES],
)
def test_two_hosts_have_the_numbers_of_one_process_and_listen_to_one_another_only(
    pair: Hosts, alone: dict[str, object], name: str
) -> None:
    case = CASES[name]
    Path("script.py").write_text(SCRIPT)
    named = ",".join(f"{host}:1" for host in pair.names)
    env = {**one_thread(), "PYTHONPATH": str(ROOT), "RUN": str(Path.cwd())}
    env["BACKENDS"] = " then ".join(case.backends)
    python = sys.executable if case.imports else warm_python_on(pair, **env)
    options = ("--hosts", named, "--rsh", pair.agent)
    words = launch_command(*options, "script.py", *case.backends[0].split(), python=python)
    done = pair.run(0, *words, env=env, cwd=Path.cwd(), timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    for number in range(len(case.backends)):
        folder = Path(str(number))
        _check_numbers(folder, alone)
        looked = list(folder.glob("listening-*"))
        assert len({path.name.rpartition("-")[2] for path in looked}) == 2
        for path in looked:
            _check_listening(path.read_text())


def _check_numbers(folder: Path, alone: dict[str, object]) -> None:
    found = json.loads((folder / "numbers.json").read_text())
    for key in ("loss", "predicted"):
        np.testing.assert_allclose(found[key], alone[key], rtol=1e-10, atol=1e-10)


def _check_listening(text: str) -> None:
    """Check the addresses in the output of `ss -ltnH`: of the hosts' network or loopback."""
    addresses = [line.split()[3] for line in text.splitlines()]
    assert [address for address in addresses if "10." in address], text
    own = ("10.", "127.", "[::1]", "[::ffff:10.", "[::ffff:127.")
    assert all(address.startswith(own) for address in addresses), text


@pytest.mark.exhaustive
def test_parameter_servers_on_two_hosts_have_the_numbers_of_one_process(
    pair: Hosts, alone: dict[str, object]
) -> None:
    Path("script.py").write_text(SCRIPT)
    placed = {"chief": [0], "worker": [0, 1], "ps": [1]}
    ports = iter(range(20100, 20200))
    jobs = {job: [f"{pair.addresses[h]}:{next(ports)}" for h in on] for job, on in placed.items()}
    words = ["script.py", "backend=tf_distribute", "backend.strategy=parameter_server"]
    words.append("backend.join=step")  # else workers do not wait for one another
    network = pair.addresses[0].rpartition(".")[0] + ".0/24"
    hold, tasks = Path.cwd() / "looked", []
    for job, on in reversed(placed.items()):
        for index, host in enumerate(on):
            config = {"cluster": jobs, "task": {"type": job, "index": index}}
            env = {
                **one_thread(),
                "PYTHONPATH": str(ROOT),
                "RUN": str(Path.cwd()),
                "TF_CONFIG": json.dumps(config),
                "KTRAINER_NETWORK": network,
                "HOLD": str(hold),
            }
            python = warm_python_on(pair, **env)
            tasks.append(pair.start(host, python, *words, env=env, cwd=Path.cwd()))
    chief, deadline = tasks[-1], time.monotonic() + 100
    while not list(Path("0").glob("listening-*")) and chief.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    looked = [pair.run(host, "ss", "-ltnHp").stdout for host in (0, 1)]
    hold.touch()
    ended = [task.communicate(timeout=60) for task in reversed(tasks)]
    assert [task.returncode for task in tasks] == [0] * 4, ended
    _check_numbers(Path("0"), alone)
    for text in looked:
        _check_listening(text)
