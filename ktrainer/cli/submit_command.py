"""`ktrainer submit SCRIPT`: write the file that starts a run on a cluster, and explain it."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

from ktrainer.cli.launch_config import checked_config, naming_the_separator
from ktrainer.cli.launch_options import add_script, positive
from ktrainer.config import Config
from ktrainer.errors import RUN_AGAIN, ConfigError, SetupError
from ktrainer.launch.cluster_job import SCHEDULERS, ClusterJob
from ktrainer.script.plain_script import is_plain

_MINUTES = 60
_NOT_OF_ALL = ("time", "grace", "image", "runtime")
_SIGNAL_MARGIN = 60  # Slurm may send its signal so many seconds late


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer submit`."""
    parser.description = (
        "Write the file with which a cluster's scheduler starts a run on several hosts, check its "
        "configuration, and say how to start it and what happens then. Nothing is started "
        "without --start."
    )
    integer = positive(int)
    parser.add_argument(
        "--to", choices=list(SCHEDULERS), default="slurm", help="the scheduler (default: slurm)"
    )
    parser.add_argument("--nodes", type=integer, default=1, help="hosts (default: 1)")
    parser.add_argument(
        "-n", "--ranks", type=integer, default=1, help="processes on each host (default: 1)"
    )
    parser.add_argument(
        "--cores", type=integer, default=1, help="cores of each process (default: 1)"
    )
    parser.add_argument(
        "--time",
        type=_minutes,
        metavar="H:MM",
        help="time limit, but for skypilot (default: 1:00)",
    )
    parser.add_argument(
        "--grace",
        type=integer,
        metavar="S",
        help="seconds before Slurm's time limit at which the processes save and end (default: "
        f"trainer.interrupt.grace and {_SIGNAL_MARGIN} more)",
    )
    parser.add_argument("--name", help="of the job (default: the script's)")
    parser.add_argument("--image", default="", help="of containers, for mpijob and trainjob")
    parser.add_argument(
        "--runtime",
        help=f"of a trainjob: a ClusterTrainingRuntime with an MPI policy "
        f"(default: {ClusterJob.runtime})",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the file (default: the job's name, here)"
    )
    parser.add_argument("--start", action="store_true", help="hand the file to the scheduler")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Write the job's file; return the exit status, with `--start` the scheduler's.

    Raises:
        ConfigError: the options, the script or the configuration cannot work, or there is another
            file.
        SetupError: the file cannot be written, or the scheduler's program is not here.
    """
    _check_script(args.script)
    _check_options(args)
    with naming_the_separator(args.args):
        ranks = args.nodes * args.ranks
        config = checked_config(args.script, args.args, ranks, None, {}) or Config()
    job, scheduler = _job(args, config), SCHEDULERS[args.to]
    path = args.output or Path(f"{job.name}.{scheduler.ending}")
    _write(path, scheduler.write(job))
    start = [*scheduler.start, str(path)]
    print(_explanation(args.to, job, config, path, start))
    return _start(start) if args.start else 0


def _check_script(script: str) -> None:
    """Refuse a script that trains in several processes only where `ktrainer run` starts them."""
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}; give the path from the current folder")
    if is_plain(Path(script).read_bytes()):
        raise ConfigError(
            f"{script} names no Trainer: unless it connects the job's processes by itself, each "
            "would train alone, as only `ktrainer run` distributes such a script. Call fit of a "
            "Trainer: trainer = Trainer.from_cli(), then trainer.fit(model, ...); or start "
            "`ktrainer run` in a job of your own. If it does connect them, or a module that it "
            "imports makes the Trainer, add `from ktrainer import Trainer` to the script."
        )


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options of another scheduler, and those that are missing for this one."""
    scheduler = SCHEDULERS[args.to]
    for option in _NOT_OF_ALL:
        if getattr(args, option) and option not in scheduler.options:
            has = [name for name, each in SCHEDULERS.items() if option in each.options]
            raise ConfigError(
                f"--{option} is for --to {' or '.join(has)}, not for {args.to}: leave it out."
            )
    if "image" in scheduler.options and not args.image:
        raise ConfigError(
            f"--to {args.to} runs in containers: give --image, with ktrainer, an MPI with mpirun, "
            "and sshd in it."
        )


def _write(path: Path, text: str) -> None:
    """Write the job's file, over no other one."""
    try:
        if path.exists() and path.read_bytes() != text.encode():
            raise ConfigError(
                f"{path} exists, with another text, so it is not overwritten: remove it, or give "
                "--output another name."
            )
        path.write_text(text)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}; give --output.") from error


def _job(args: argparse.Namespace, config: Config) -> ClusterJob:
    grace = args.grace or int(config.trainer.interrupt.grace) + _SIGNAL_MARGIN
    minutes = args.time or _MINUTES
    if args.to == "slurm" and grace >= minutes * 60:
        raise ConfigError(f"--grace: {grace} s are no less than the time limit; give more --time.")
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.script).stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 50:
        raise ConfigError(
            f"{name!r} cannot name a job: give --name with lower-case letters, digits and '-', 50 "
            "at most, a letter first."
        )
    return ClusterJob(
        name,
        args.nodes,
        args.ranks,
        args.cores,
        minutes,
        grace,
        args.script,
        _without_separator(args.args),
        args.image,
        args.runtime or ClusterJob.runtime,
    )


def _without_separator(words: list[str]) -> list[str]:
    """The script's words as it gets them: without the first `--`; another one is the script's."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *words[end + 1 :]]


def _explanation(to: str, job: ClusterJob, config: Config, path: Path, start: list[str]) -> str:
    lines = [
        f"{path}: {job.size} processes, {job.ranks} on each of {job.nodes} host(s), "
        f"{job.cores} core(s) each",
        f"start it with: {shlex.join(start)}",
    ]
    if to == "slurm":
        lines += [
            f"{job.grace} s before the time limit of {job.minutes} min all processes get SIGTERM, "
            f"finish the step, save and exit with {RUN_AGAIN}; the job then goes back into the "
            "queue, and resumes",
            f"to have it resume now: scancel --signal=TERM JOB; to end it: scancel JOB (see "
            f"{job.name}-JOB.out)",
        ]
    elif to == "skypilot":
        lines.append("a managed job (`sky jobs launch`) starts again where nodes are preempted")
    else:
        lines.append(
            "if a process or its pod fails, mpirun is started again and resumes"
            if to == "mpijob"
            else "the runtime says how often mpirun is started again if a process or pod fails"
        )
    return "\n".join(lines + [f"note: {note}" for note in _notes(to, job, config)])


def _notes(to: str, job: ClusterJob, config: Config) -> list[str]:
    """Reasons why the job may not start or resume, as far as the command line says."""
    notes = []
    if config.checkpoint.every is None:
        notes.append("without checkpoint.every there is nothing to resume from.")
    folder = config.checkpoint.dir or config.run.dir
    if folder is None or "{time}" in folder:
        notes.append(
            "set run.dir to a fixed folder that all hosts share, else each start makes a new one."
        )
    if config.checkpoint.resume != "auto":
        notes.append("set checkpoint.resume=auto, else each start begins from the beginning.")
    if to == "slurm" and "SIGTERM" not in config.trainer.interrupt.signals:
        notes.append(
            "set trainer.interrupt.signals=[SIGTERM,SIGINT], else the processes do not save when "
            "Slurm sends SIGTERM."
        )
    if to == "skypilot" and Path(job.script).is_absolute():
        notes.append(
            "give the script's path from this folder: its nodes have this folder, not that path."
        )
    if to != "slurm":
        notes.append("mpirun kills its processes on SIGTERM: they resume from the last checkpoint.")
    return notes


def _start(command: list[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise SetupError(
            f"there is no {command[0]} here: copy the file to where it is, and run "
            f"`{shlex.join(command)}`."
        ) from None


def _minutes(text: str) -> int:
    found = re.fullmatch(r"(\d+):([0-5]\d)", text)
    if found is None or not (minutes := 60 * int(found[1]) + int(found[2])):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2:30 (hours, minutes)")
    return minutes
