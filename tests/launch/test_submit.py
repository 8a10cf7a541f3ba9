"""`ktrainer submit`: what it writes is what the schedulers take, and they run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from ktrainer.cli import main
from ktrainer.launch.mpirun_command import find_mpirun
from tests import processes
from tests.dist.harness.group import ROOT
from tests.dist.harness.hosts import INTERFACE, Hosts
from tests.launch.slurm import slurm, why_no_slurm

SCHEMAS = Path(__file__).parent / "schemas"
SCRIPT = '''
import os
import time
from pathlib import Path

import keras
import numpy as np

from ktrainer import Callback, Trainer


class Stay(Callback):
    """In its first start a job of Slurm stays at an update until it is interrupted."""

    def on_step_end(self, step, logs=None):
        if step == 5 and "SLURM_JOB_ID" in os.environ:
            if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
                Path("staying").touch()
                time.sleep(6)


keras.config.set_floatx("float64")
trainer = Trainer.from_cli(callbacks=[Stay()])
random = np.random.default_rng(0)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
model.compile("adam", "mse")
trainer.fit(model, (random.normal(size=(96, 8)), random.normal(size=(96, 3))))
if trainer.world.is_root:
    print("size", trainer.world.size, flush=True)
    np.savez(os.environ.get("WEIGHTS", "weights.npz"), *model.get_weights())
'''
WORDS = ["trainer.epochs=3", "seed=1", "logging.progress=none"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _submit(script: Path, to: str, *options: str, words: list[str]) -> Path:
    path = script.parent / f"job.{to}"
    path.unlink(missing_ok=True)  # of an earlier call with other words
    image = ["--image", "registry/train:1"] if to.endswith("job") else []
    command = ["submit", "--to", to, *image, *options, "--output", str(path), str(script)]
    assert main.main([*command, *words]) == 0
    return path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The weights of one process that nothing interrupts."""
    path = tmp_path_factory.mktemp("alone") / "train.py"
    path.write_text(SCRIPT)
    return _weights(path, processes.script(path, *WORDS, cwd=path.parent, seconds=120))


def _quiet(script: Path) -> dict[str, Any]:
    return {"cwd": script.parent, "capture_output": True, "text": True, "timeout": 120}


def _weights(script: Path, done: subprocess.CompletedProcess[str]) -> list[np.ndarray]:
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(script.parent / "weights.npz") as found:
        weights = [found[name] for name in found.files]
    (script.parent / "weights.npz").unlink()
    return weights


def _same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, 1e-10, 1e-10)


@pytest.mark.parametrize("to", ["mpijob", "trainjob"])
def test_manifests_follow_the_published_schemas(script: Path, to: str) -> None:
    path = _submit(script, to, "--nodes", "2", "-n", "3", words=["a b", *WORDS])
    job = yaml.safe_load(path.read_text())
    schema = json.loads((SCHEMAS / f"{to}.json").read_text())
    jsonschema.validate(job, schema)
    job["spec"]["nodes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nodes"):
        jsonschema.validate(job, schema)
    command = _command(job)
    assert command[command.index("-n") + 1] == "6"
    assert command[-len(WORDS) - 1 :] == ["a b", *WORDS]


def _command(job: dict[str, Any]) -> list[str]:
    """What starts the ranks in a manifest."""
    if job["kind"] == "TrainJob":
        return job["spec"]["trainer"]["command"]
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return launcher["containers"][0]["command"]


def test_what_cannot_work_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (plain := tmp_path / "plain.py").write_text("import keras\nkeras.Sequential().fit()\n")
    for words, said in {
        (str(plain), "backend=data_parallel"): "names no Trainer: unless it connects the job's",
        ("--to", "mpijob", str(script)): "give --image",
        ("--name", "My_Job", str(script)): "cannot name a job",
        ("--time", "0:01", str(script)): "90 s are no less than the time limit",
        (str(tmp_path / "none.py"),): "there is no script",
        ("-o", str(tmp_path / "none" / "x"), str(script)): "give --output",
        ("-o", str(script), str(script)): "exists, with another text",
        (str(script), "trainer.epoch=3"): "unknown key",
        ("--image", "x", str(script)): "--image is for --to mpijob or trainjob, not for slurm",
        ("--to", "skypilot", "--time", "1:00", str(script)): "not for skypilot",
        ("--to", "mpijob", "--grace", "9", "--image", "x", str(script)): "is for --to slurm",
    }.items():
        assert main.main(["submit", *words]) == 2
        assert said in capsys.readouterr().err
    assert script.read_text() == SCRIPT
    with pytest.raises(SystemExit):
        main.main(["submit", "--time", "1h", str(script)])


def test_it_says_how_to_start_and_what_a_resume_lacks(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _submit(script, "slurm", words=WORDS)
    said = capsys.readouterr().out
    assert f"start it with: sbatch {script.parent / 'job.slurm'}" in said
    assert "note: without checkpoint.every" in said
    assert "note: set run.dir" in said
    resumes = ["run.dir=runs/a", "checkpoint.every=1ep"]
    _submit(script, "slurm", words=resumes)
    assert "note:" not in capsys.readouterr().out
    _submit(script, "slurm", words=[*resumes, "trainer.interrupt.signals=[SIGINT]"])
    assert "note: set trainer.interrupt.signals" in capsys.readouterr().out
    _submit(script, "skypilot", words=resumes)
    assert "note: give the script's path from this folder" in capsys.readouterr().out


def test_the_script_gets_its_own_words(script: Path) -> None:
    path = _submit(script, "slurm", words=["run.dir=a", "--", "--name", "b c", "--", "d"])
    (command,) = (line for line in path.read_text().splitlines() if line.startswith("srun"))
    assert shlex.split(command)[-6:] == [str(script), "run.dir=a", "--name", "b c", "--", "d"]


@pytest.mark.exhaustive
def test_slurm_runs_the_job_and_resumes_it_after_a_signal(
    script: Path, one_process: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With two processes, interrupted at update 5: the weights of one that was not."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    words = ["backend=data_parallel", "run.dir=run", "checkpoint.every=1ep", *WORDS]
    submit = (processes.warm_python(), "-m", "ktrainer.cli.main", "submit", "-n", "2", "--start")
    with slurm(tmp_path_factory.mktemp("slurm")) as env:

        def call(*command: str) -> str:
            done = subprocess.run(command, env=env, check=True, **_quiet(script))
            return str(done.stdout).strip()

        def until(condition: Callable[[], bool], job: str) -> None:
            end = time.monotonic() + 120
            while not condition():
                output = script.parent / f"train-{job}.out"
                text = output.read_text() if output.exists() else ""
                assert time.monotonic() < end, f"{call('scontrol', 'show', 'job', job)}\n{text}"
                time.sleep(0.2)

        started = re.search(r"Submitted batch job (\d+)", call(*submit, str(script), *words))
        assert started is not None
        job = started[1]
        until((script.parent / "staying").exists, job)
        call("scancel", "--signal=TERM", job)
        until(lambda: "PENDING" in call("squeue", "--noheader", "--format=%T", "--job", job), job)
        time.sleep(1.5)  # Slurm's clock has seconds
        call("scontrol", "update", f"JobId={job}", "StartTime=now")  # it waits two minutes else
        until(lambda: "COMPLETED" in call("scontrol", "show", "job", job), job)
    said = (script.parent / f"train-{job}.out").read_text()
    assert "interrupted by SIGTERM at step 5" in said
    assert said.count("size 2") == 1
    _same(_weights(script, subprocess.CompletedProcess([], 0)), one_process)


@pytest.mark.exhaustive
def test_its_mpirun_trains_over_two_hosts(
    hosts: Callable[[int], Hosts], script: Path, one_process: list[np.ndarray]
) -> None:
    """With a hostfile, as Kubeflow mounts it, and the addresses that SkyPilot gives."""
    made = hosts(2)
    warm = Path(processes.warm_python_on(made, PYTHONPATH=str(ROOT)))
    path = f"{warm.parent}:{Path(find_mpirun()).parent}:{os.environ['PATH']}"
    for host in range(2):
        made.prelude(host, f"export PATH={path} PYTHONPATH={ROOT}")
    env = {
        "PRTE_MCA_plm_ssh_agent": str(made.agent),
        "PRTE_MCA_prte_if_include": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "WEIGHTS": str(script.parent / "weights.npz"),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "\n".join(made.names),  # which the agent knows
    }
    hostfile = script.parent / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in made.names))
    for to, each in (("mpijob", 1), ("skypilot", 2)):
        words = ["backend=data_parallel", f"run.dir={script.parent}/{to}", *WORDS]
        written = _submit(script, to, "--nodes", "2", "-n", str(each), words=words)
        job = yaml.safe_load(written.read_text())
        command = job["run"] if to == "skypilot" else shlex.join(_command(job))
        command = command.replace("/etc/mpi/hostfile", str(hostfile))
        done = made.run(0, "bash", "-c", command, env=env, timeout=150, cwd=script.parent)
        assert f"size {2 * each}" in done.stdout, done.stdout + done.stderr
        _same(_weights(script, done), one_process)
