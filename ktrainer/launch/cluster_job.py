"""A run on a cluster, described once, and written for each scheduler that can start it.

ClusterJob --> sbatch script      `srun` starts the ranks, Slurm starts the job again
           --> MPIJob, TrainJob   Kubeflow starts `mpirun` in one pod, its ranks in others
           --> SkyPilot task      the first node starts `mpirun` over all
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ktrainer.errors import RUN_AGAIN

MOST_RESTARTS = 100
_HOSTFILE = "/etc/mpi/hostfile"  # where Kubeflow mounts it
_KUBECTL = ("kubectl", "create", "-f")
_MPI_ENVIRONMENT = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclass(frozen=True)
class ClusterJob:
    """A run: hosts, processes, command.

    Attributes:
        name: of the job, and of its file.
        nodes: hosts.
        ranks: processes on each of them.
        cores: of each process.
        minutes: time limit.
        grace: seconds before the time limit at which ranks are asked to save and end.
        script: a Python file.
        words: its arguments.
        image: of the containers; for Kubernetes.
        runtime: of a TrainJob: a ClusterTrainingRuntime with an MPI policy.
        python: runs the script on Slurm's nodes.
    """

    name: str
    nodes: int
    ranks: int
    cores: int
    minutes: int
    grace: int
    script: str
    words: Sequence[str] = ()
    image: str = ""
    runtime: str = "deepspeed-distributed"
    python: str = sys.executable

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks

    def mpirun(self, *placement: str) -> list[str]:
        """The command that starts all ranks, where `python` and `mpirun` are on PATH."""
        return [
            *("mpirun", "--allow-run-as-root", *placement, "-n", str(self.size)),
            *("--map-by", "slot", "--bind-to", "none"),
            *(word for name in _MPI_ENVIRONMENT for word in ("-x", name)),
            *("python", self.script, *self.words),
        ]


def sbatch_script(job: ClusterJob) -> str:
    """The script for Slurm's `sbatch`, with the reason of each line."""
    exports = [f"export {name}={value}" for name, value in _MPI_ENVIRONMENT.items()]
    command = shlex.join([job.python, job.script, *job.words])
    srun = f"srun --mpi=pmix --kill-on-bad-exit=0 --wait={job.grace}"
    return "\n".join(
        [
            "#!/bin/bash",
            *_sbatch_directives(job),
            "",
            *exports,
            "# Slurm connects the processes; the first that ends leaves the others time to save:",
            f"{srun} --cpus-per-task={job.cores} {command}",
            "code=$?",
            f"# {RUN_AGAIN}: interrupted, and there is a checkpoint to resume from:",
            f'if [ "$code" -eq {RUN_AGAIN} ] && '
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_RESTARTS} ]; then',
            f'  scontrol requeue "$SLURM_JOB_ID" && sleep {job.grace}  # ended meanwhile',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _sbatch_directives(job: ClusterJob) -> list[str]:
    """The lines that Slurm reads, each with its reason before it."""
    hours, minutes = divmod(job.minutes, 60)
    directives = [
        (f"--job-name={job.name}", ""),
        (f"--nodes={job.nodes}", ""),
        (f"--ntasks-per-node={job.ranks}", "one task is one process of the training"),
        (f"--cpus-per-task={job.cores}", ""),
        (f"--time={hours}:{minutes:02}:00", "then Slurm kills the job"),
        (
            f"--signal=TERM@{job.grace}",
            f"{job.grace} s before that, every process saves a checkpoint and exits with "
            f"{RUN_AGAIN}",
        ),
        ("--requeue", "let it start again, below and after a node has failed"),
        ("--open-mode=append", "which continues the file of its output"),
        (f"--output={job.name}-%j.out", ""),
    ]
    lines = []
    for directive, reason in directives:
        lines += [*([f"# {reason}:"] if reason else []), f"#SBATCH {directive}"]
    return lines


def mpi_job(job: ClusterJob) -> str:
    """A Kubeflow MPIJob (MPI Operator, v2beta1)."""
    workers = {**_container(job), "command": ["/usr/sbin/sshd", "-De"]}
    workers["resources"] = {"limits": {"cpu": str(job.cores * job.ranks)}}
    launcher = {**_container(job), "command": job.mpirun("--hostfile", _HOSTFILE)}
    spec = {
        "slotsPerWorker": job.ranks,
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": MOST_RESTARTS,
            "activeDeadlineSeconds": job.minutes * 60,
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", **_pod(launcher)},
            "Worker": {"replicas": job.nodes, **_pod(workers)},
        },
    }
    return _manifest("kubeflow.org/v2beta1", "MPIJob", job, spec)


def train_job(job: ClusterJob) -> str:
    """A TrainJob of Kubeflow Trainer (v1alpha1), whose runtime has an MPI policy."""
    resources = {"limits": {"cpu": str(job.cores * job.ranks)}}
    trainer = {
        **{key: value for key, value in _container(job).items() if key != "name"},
        "command": job.mpirun("--hostfile", _HOSTFILE),
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "resourcesPerNode": resources,
    }
    spec = {
        "runtimeRef": {"name": job.runtime},
        "activeDeadlineSeconds": job.minutes * 60,
        "trainer": trainer,
    }
    return _manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)


def sky_task(job: ClusterJob) -> str:
    """A task for SkyPilot."""
    hosts = f"$(echo \"$SKYPILOT_NODE_IPS\" | sed 's/$/:{job.ranks}/' | paste -sd, -)"
    start = shlex.join(job.mpirun("--host", "HOSTS")).replace("HOSTS", f'"{hosts}"', 1)
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": {"cpus": f"{job.cores * job.ranks}+"},
        "envs": dict(_MPI_ENVIRONMENT),
        "setup": 'pip install "ktrainer[cpu]"\n',
        "run": f'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n  exec {start}\nfi\n',
    }
    return _yaml(task)


@dataclass(frozen=True)
class Scheduler:
    """A way to start a job.

    Attributes:
        write: makes the text of the job's file.
        ending: of the file's name.
        start: the command that starts it, but for the file.
        options: those of `ktrainer submit` that not all schedulers have; `image` is then required.
    """

    write: Callable[[ClusterJob], str]
    ending: str
    start: tuple[str, ...]
    options: tuple[str, ...] = ()


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(sbatch_script, "sbatch", ("sbatch",), ("time", "grace")),
    "mpijob": Scheduler(mpi_job, "mpijob.yaml", _KUBECTL, ("time", "image")),
    "trainjob": Scheduler(train_job, "trainjob.yaml", _KUBECTL, ("time", "image", "runtime")),
    "skypilot": Scheduler(sky_task, "sky.yaml", ("sky", "launch")),
}


def _container(job: ClusterJob) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in _MPI_ENVIRONMENT.items()]
    return {"name": "train", "image": job.image, "env": env}


def _pod(container: Mapping[str, Any]) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [dict(container)]}}}


def _manifest(version: str, kind: str, job: ClusterJob, spec: Mapping[str, Any]) -> str:
    metadata = {"name": job.name}
    return _yaml({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)})


def _yaml(value: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, and no references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)
