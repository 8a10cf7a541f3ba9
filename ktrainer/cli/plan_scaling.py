"""`ktrainer plan SCRIPT --world N`: the step time that other numbers of processes would have."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktrainer.cli import run_command
from ktrainer.cli.launch_config import load_launch_config
from ktrainer.config import parse_known_cli
from ktrainer.distributed.world import SingleWorld
from ktrainer.errors import ConfigError
from ktrainer.launch import hosts as host_list
from ktrainer.launch.launch_folders import private_folder
from ktrainer.plan_report.planning_mode import PlanRequest, ScalingRequest, planning_for
from ktrainer.runtime.hardware import Hardware

MOST_PROCESSES = 1024
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LAUNCH = ("hosts", "hostfile", "rsh", "interface")
OPTIONS = ("world", "per_host", "cores", "threads", "latency", "bandwidth", *_LAUNCH)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a plan for several numbers of processes."""
    group = parser.add_argument_group(
        "step time of other numbers of processes",
        "Steps of the script's model and the links between ranks are measured, in processes that "
        "train on their own; nothing is saved. The rest is computed.",
    )
    group.add_argument(
        "--world",
        metavar="N[,N...]",
        help=f"predict the step time of N processes, at most {MOST_PROCESSES}, and of 1, 2, 4, ... "
        "up to N; or of these numbers",
    )
    group.add_argument(
        "--per-host", metavar="N", help="the most processes on a host (default: its cores or GPUs)"
    )
    group.add_argument("--cores", metavar="N", help="cores of a host (default: those of this one)")
    group.add_argument(
        "--threads",
        metavar="N",
        help="threads of a process (default: world.threads, else the cores divided by --per-host)",
    )
    group.add_argument(
        "--latency",
        metavar="TIME",
        help="of a small message between hosts, one way, as 50us; with --bandwidth",
    )
    group.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="between hosts a second, each way, as 10Gbit or 1.25GB",
    )
    group.add_argument(
        "--hosts", metavar="A:N,B:N", help="measure on these hosts, and the network between them"
    )
    group.add_argument("--hostfile", metavar="FILE", help="instead of --hosts, as for ktrainer run")
    group.add_argument("--rsh", metavar="AGENT", help="as for ktrainer run")
    group.add_argument("--interface", metavar="NAME", help="as for ktrainer run")


def refuse_without_world(given: Mapping[str, str | None]) -> None:
    """Refuse options that say nothing without `--world`.

    Raises:
        ConfigError: naming one.
    """
    for name in OPTIONS:
        if given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for predicted step times: add --world N.")


def run(path: Path, words: Sequence[str], given: Mapping[str, str | None]) -> int:
    """Measure on this host or on those that are given, and print the predictions.

    Raises:
        ConfigError: an option is no number or has no unit, or says too little.
    """
    worlds = parse_worlds(given["world"] or "")
    hosts, here = _hosts(given), Hardware.detect(SingleWorld())
    with private_folder() as name:
        request = _request(worlds, path, words, given, hosts, here, str(Path(name) / "report"))
        command = _command(path, words, given, hosts, here, request)
        parser = argparse.ArgumentParser(prog="ktrainer plan", allow_abbrev=False)
        run_command.add_arguments(parser)
        environ = dict(os.environ)
        os.environ.update(request.to_environment())
        try:
            with planning_for(PlanRequest(request.worlds[-1], scaling=request)):
                code = run_command.run(parser.parse_args(command))
        finally:
            os.environ.clear()
            os.environ.update(environ)
        report = Path(request.report)
        if report.is_file():
            print(report.read_text(encoding="utf-8"))
            return code
    if code == 0:
        raise ConfigError(
            f"{path} has ended without fit, so there is no step to measure. Call fit at the top "
            'level or under `if __name__ == "__main__"`.'
        )
    return code


def parse_worlds(text: str) -> tuple[int, ...]:
    """The numbers of `--world`, in rising order.

    Raises:
        ConfigError: they are none, below 1, or above 1024.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--world: {text!r} is no number of processes: write --world 64, or --world 1,2,3,4."
        )
    worlds = sorted({int(part) for part in parts})
    for wrong in (worlds[0], worlds[-1]):
        if not 1 <= wrong <= MOST_PROCESSES:
            raise ConfigError(
                f"--world: step times are predicted for 1 to {MOST_PROCESSES} processes, not for "
                f"{wrong}."
            )
    return tuple(worlds)


def parse_latency(text: str) -> float:
    """Seconds of `50us`.

    Raises:
        ConfigError: it is no number with a unit.
    """
    found = re.fullmatch(_NUMBER + f"({'|'.join(_TIMES)})", text.strip())
    if found is None:
        raise ConfigError(
            f"--latency: {text!r} is no time: write a number and its unit, such as 50us or 0.2ms "
            f"({', '.join(_TIMES)})."
        )
    return float(found[1]) * _TIMES[found[2]]


def parse_bandwidth(text: str) -> float:
    """Bytes a second of `10Gbit` or `1.25GB`.

    Raises:
        ConfigError: it is no number above 0 with a unit.
    """
    units = r"([kMGT]?)(bit|bits|b|B)(?:/s|ps)?"
    found = re.fullmatch(_NUMBER + units, text.strip())
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"--bandwidth: {text!r} is no rate: write a number and its unit, such as 10Gbit (bits "
            "a second) or 1.25GB (bytes a second), with k, M, G or T in front of it."
        )
    return float(found[1]) * _POWERS[found[2]] / (1 if found[3] == "B" else 8)


def _hosts(given: Mapping[str, str | None]) -> list[host_list.Host]:
    hosts, file = given["hosts"], given["hostfile"]
    if hosts is not None:
        return host_list.parse_hosts(hosts)
    return [] if file is None else host_list.read_hostfile(file)


def _request(
    worlds: tuple[int, ...],
    script: Path,
    words: Sequence[str],
    given: Mapping[str, str | None],
    hosts: Sequence[host_list.Host],
    here: Hardware,
    report: str,
) -> ScalingRequest:
    path, overrides, _ = parse_known_cli(list(words))
    config = load_launch_config(str(script), path, overrides)
    cores = _positive(given, "cores") or here.cores
    threads = _positive(given, "threads") or config.world.threads
    fitting = here.gpus or max(1, cores // (threads or 1))
    most = max((host.slots for host in hosts), default=fitting)
    per_host = _positive(given, "per_host") or most
    latency, bandwidth = given["latency"], given["bandwidth"]
    request = ScalingRequest(
        worlds,
        per_host,
        cores,
        threads or max(1, cores // per_host),
        report,
        None if latency is None else parse_latency(latency),
        None if bandwidth is None else parse_bandwidth(bandwidth),
    )
    _check_network(request, hosts)
    return request


def _check_network(request: ScalingRequest, hosts: Sequence[host_list.Host]) -> None:
    """Refuse a plan over hosts whose network is not known."""
    if (request.latency is None) != (request.bandwidth is None):
        raise ConfigError("--latency and --bandwidth describe the network together: give both.")
    most = request.worlds[-1]
    needed = -(-most // request.per_host)
    if needed > 1 and request.latency is None and len(hosts) < 2:
        raise ConfigError(
            f"{most} processes, {request.per_host} to a host, are on {needed} hosts, and the "
            "network between them is not known: give --latency and --bandwidth (as 50us and "
            "10Gbit), or measure it by --hosts with two hosts or more. For all on one host, give "
            f"--per-host {most}."
        )
    together = min(most, request.per_host)
    if together > 1 and hosts and all(host.slots == 1 for host in hosts):
        raise ConfigError(
            f"--per-host: {together} processes share a host, and their link is not known, as each "
            f"of --hosts has one: give one two processes, as {hosts[0].name}:2, or --per-host 1."
        )


def _command(
    path: Path,
    words: Sequence[str],
    given: Mapping[str, str | None],
    hosts: Sequence[host_list.Host],
    here: Hardware,
    request: ScalingRequest,
) -> list[str]:
    """The words of `ktrainer run` that start the processes which measure."""
    end = words.index("--") if "--" in words else len(words)
    # One whose ranks heal has no group of its own for each; and no rank shall be replaced.
    words = [*words[:end], "world.heal=false", *words[end:]]
    if hosts:
        options = [f"--{name}={given[name]}" for name in _LAUNCH if given[name] is not None]
    else:
        options = [f"--ranks={_measuring(request, here)}"]
    # Each measurement binds the processes itself.
    flags = ["--no-bind", "--no-prefix", f"--threads={request.threads}"]
    return [*options, *flags, str(path), *words]


def _measuring(request: ScalingRequest, here: Hardware) -> int:
    """How many processes measure on this host.

    Two at least where ranks share a host: their link is measured. Where those planned for share
    cores, two for each place, to measure what they lose by taking turns on it; not on a GPU.
    """
    on_host = min(request.per_host, request.worlds[-1])
    places = max(1, min(here.cores, request.cores) // request.threads)
    shared = on_host > max(1, request.cores // request.threads)
    return min(on_host, max(2, here.gpus or places * (2 if shared else 1)))


def _positive(given: Mapping[str, str | None], name: str) -> int | None:
    text = given[name]
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is no whole number from 1.")
    return int(text)
