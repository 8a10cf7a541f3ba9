"""A cluster of Slurm with this machine as its only node, started by the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev")
_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
KillWait=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """The reason why Slurm cannot run here; None if it can. In CI its packages are installed."""
    if os.geteuid() != 0:
        return "a cluster of Slurm needs root"
    install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    if not _installed() and os.environ.get("CI") and shutil.which("apt-get"):
        for command in (["apt-get", "update"], install):
            subprocess.run(command, capture_output=True, check=False)
    return None if _installed() else f"Slurm is not installed: {' '.join(install)}"


def _installed() -> bool:
    plugins = Path("/usr/lib").glob("*/slurm-wlm/mpi_pmix.so")
    pmix = Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")
    return all(map(shutil.which, _PROGRAMS)) and any(plugins) and any(pmix)


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; gives the environment for Slurm's commands. Ends all that they started."""
    folder.chmod(0o755)
    for name in ("spool", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, ports=_free_ports(2)))
    (folder / "cgroup.conf").touch()
    env = {**os.environ, "SLURM_CONF": str(config)}
    munge = ["munged", "--foreground", "--force"]
    files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
    munge += [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    munge += [f"--seed-file={folder}/munge.seed"]
    commands = [munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D"]]
    started: list[psutil.Popen] = []
    try:
        for command in commands:
            quiet = subprocess.DEVNULL
            started.append(psutil.Popen(command, env=env, stdout=quiet, stderr=quiet))
            if command is munge:
                _until(lambda: (folder / "munge.socket").exists(), "munged")
        idle = ["sinfo", "--noheader", "--format=%T"]
        _until(lambda: _output(idle, env) == "idle", "a node of Slurm")
        yield env
    finally:
        if len(started) == len(commands):  # steps are not children of the daemons
            _output(["scancel", "--full", "--signal=KILL", "--user=root"], env)
            _output(["scancel", "--user=root"], env)
        children = [child for daemon in started for child in daemon.children(recursive=True)]
        for process in [*children, *reversed(started)]:
            process.kill()
        for daemon in started:
            daemon.wait()


def _output(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _until(condition: object, what: str, seconds: float = 30.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not start within {seconds:g} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
