"""The cluster of TensorFlow processes in the environment: TF_CONFIG, or Slurm's variables.

Pure: nothing is connected, and TensorFlow is not imported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktrainer.config.backend_keys import TfDistributeConfig
from ktrainer.config.schema import Config
from ktrainer.errors import ConfigError

JOBS = ("chief", "worker", "ps", "evaluator")
SLURM_PORT = 8888  # of the first task on a host; the others follow
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})")


@dataclass(frozen=True)
class ClusterSpec:
    """The processes of a cluster, by address.

    Attributes:
        jobs: addresses `host:port` by job: `chief`, `worker`, `ps`, in the order of tasks.
        job, task: job and task of this process.
    """

    jobs: Mapping[str, tuple[str, ...]]
    job: str
    task: int

    @property
    def workers(self) -> list[str]:
        """Addresses of the processes that compute together, the chief first."""
        return [*self.jobs.get("chief", ()), *self.jobs.get("worker", ())]

    @property
    def address(self) -> str:
        """The address of this process."""
        return self.jobs[self.job][self.task]

    @property
    def number(self) -> int:
        """The index of this process among `workers`."""
        return self.workers.index(self.address)

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""
        return bool(self.jobs.get("ps"))

    def as_json(self) -> str:
        """The value of TF_CONFIG."""
        cluster = {job: list(addresses) for job, addresses in self.jobs.items()}
        return json.dumps({"cluster": cluster, "task": {"type": self.job, "index": self.task}})


def tf_config(environ: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The cluster in TF_CONFIG; None without one, or where it names one process.

    Raises:
        ConfigError: it is malformed; says where.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(f"it is no JSON ({error})", text) from None
    if not isinstance(values, dict):
        raise _bad("it is no object", text)
    cluster, task = values.get("cluster") or {}, values.get("task") or {}
    if not cluster:
        return None
    jobs = {job: _addresses(job, tasks, text) for job, tasks in cluster.items()}
    job, index = task.get("type"), task.get("index", 0)
    if not isinstance(job, str) or job not in jobs:
        raise _bad(f"task.type is {job!r}, but the cluster has {', '.join(jobs)}", text)
    if not str(index).isdigit() or int(index) >= len(jobs[job]):
        raise _bad(f"task.index is {index!r}, but there are {len(jobs[job])} {job} tasks", text)
    found = ClusterSpec(jobs, job, int(index))
    return found if sum(map(len, jobs.values())) > 1 else None


def slurm_cluster(environ: Mapping[str, str] = os.environ) -> ClusterSpec | None:
    """The tasks of a Slurm step as workers; None outside of one, or with one task.

    Each host's tasks take ports from `KTRAINER_PORT` (default 8888) on, in the order of ranks.
    """
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    rank, per_node = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not size.isdigit() or int(size) < 2 or not hosts or rank is None or not per_node:
        return None
    port = int(environ.get("KTRAINER_PORT", SLURM_PORT))
    counts = _expand_counts(per_node)
    addresses = [
        f"{host}:{port + i}"
        for host, count in zip(expand_hosts(hosts), counts, strict=True)
        for i in range(count)
    ]
    return ClusterSpec({"worker": tuple(addresses)}, "worker", int(rank))


def cluster_asked(
    config: Config, environ: Mapping[str, str] = os.environ
) -> tuple[ClusterSpec | None, float]:
    """The cluster of a multi-process strategy, and seconds to wait for it to start.

    None if the strategy has one process, or the processes find each other in another way.
    """
    backend = config.backend
    if not isinstance(backend, TfDistributeConfig):
        return None, 0.0
    found = tf_config(environ)
    if found is not None:
        _check_jobs(found, backend.strategy)
    if backend.strategy != "multi_worker_mirrored":
        return None, backend.start_timeout
    return found or slurm_cluster(environ), backend.start_timeout


def _check_jobs(cluster: ClusterSpec, strategy: str) -> None:
    """Refuse a cluster without the jobs that the strategy needs, or with others."""
    needed = {"parameter_server": ("chief", "worker", "ps")}.get(strategy, ())
    if missing := [job for job in needed if job not in cluster.jobs]:
        raise ConfigError(
            f"names no {' and no '.join(missing)}, which strategy={strategy} needs.",
            path="TF_CONFIG",
        )
    if strategy == "multi_worker_mirrored" and cluster.job not in ("chief", "worker"):
        raise ConfigError(
            f"makes this process a {cluster.job}, which strategy={strategy} does not use: start "
            "the chief and the workers only.",
            path="TF_CONFIG",
        )


def expand_hosts(text: str) -> list[str]:
    """The hosts in a Slurm list such as `"gpu[01-03,7],login1"`."""
    hosts = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part.strip())
        if match is None:
            hosts.append(part.strip())
            continue
        for item in match[2].split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{match[1]}{number:0{len(first)}d}{match[3]}")
    return hosts


def _expand_counts(text: str) -> list[int]:
    """Tasks of each node from `"2(x3),1"`."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError("cannot be read", path="SLURM_STEP_TASKS_PER_NODE", value=text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _addresses(job: str, tasks: Any, text: str) -> tuple[str, ...]:
    if job not in JOBS:
        raise _bad(f"there is no job {job!r}: use {', '.join(JOBS)}", text)
    if isinstance(tasks, dict):  # a sparse cluster: by index
        tasks = [tasks[key] for key in sorted(tasks, key=int)]
    wrong = [t for t in tasks if not isinstance(t, str) or not _ADDRESS.fullmatch(t)]
    if wrong or not tasks:
        raise _bad(f"{job} needs a list of addresses host:port, not {wrong or tasks}", text)
    return tuple(tasks)


def _bad(why: str, text: str) -> ConfigError:
    return ConfigError(
        f"{why}. It looks like "
        '\'{"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
        '"task": {"type": "worker", "index": 0}}\'.',
        path="TF_CONFIG",
        value=text,
    )
