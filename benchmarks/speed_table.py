"""All benchmarks of speed, one after the other, and one table of what they measured: `make bench`.

    python benchmarks/speed_table.py build/bench [--page docs/concepts/elsewhere.md]

Writes `results.json` and `results.svg` to the folder, and prints the table; `--page` puts it into a
page, too. Programs that are compared take turns, with one thread a process. PyTorch is taken from
the folder `torch` in that folder, where `make bench` installs it, and Horovod from where `make
horovod` does. A program that fails is named under the table, and the others run. Takes about
twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from results import collect, draw, put_into, table, write_json

TIMEOUT = 900  # seconds for a program
ONE = [sys.executable]
TWO = [sys.executable, "-m", "ktrainer.cli.main", "run", "--no-prefix", "-n", "2"]
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "-n", "2"]
MPIRUN += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", sys.executable]
OTHERS = ("cnn", "transformer", "embedding")  # models of data-parallel steps
TURNS, ROUNDS = 2, ["--rounds", "3"]  # of programs that are compared with each other
OFTEN = ["--rounds", "8", "--epochs", "2"]  # where little is to be told from noise


def programs() -> list[tuple[list[str], str, list[str]]]:
    """How each program is started, its name, and its options, in the order of their runs."""
    has_horovod = importlib.util.find_spec("horovod") is not None
    steps, short = [*ROUNDS, "--steps", "15"], ["--steps", "20"]
    horovod = [(TWO, "data_parallel_step", [*steps, "--engine", "horovod"])]
    sizes = [*ROUNDS, "--steps", "2", "--microbatches", "8"]
    compared = [
        (TWO, "data_parallel_step", steps),
        *(horovod if has_horovod else []),
        (MPIRUN, "data_parallel_step_torch", steps),
        (TWO, "pipeline_step", [*sizes, "--schedules", "1f1b", "interleaved", "zero_bubble"]),
        (MPIRUN, "pipeline_step_torch", sizes),
    ]
    with_peer = ["mirrored, 2 devices", "central storage, 2 devices", "multi-worker mirrored, 2"]
    return [
        *[(ONE, "keras_fit", ["--rounds", "1"]), (ONE, "keras_fit_torch", ["--rounds", "1"])] * 2,
        (ONE, "zoo_fit", ROUNDS),
        (TWO, "data_parallel_fit", [*ROUNDS, *short, "backend=data_parallel"]),
        (TWO, "distributed_tape", ["--rounds", "6", "--steps", "15"]),
        (TWO, "callback_cost", [*OFTEN, "--steps", "100", "backend=data_parallel"]),
        *compared * TURNS,
        (TWO, "pipeline_step", ["--rounds", "5", "--steps", "2", "--microbatches", "4", "16"]),
        *[
            (TWO, "data_parallel_step", ["--rounds", "6", "--steps", "15", "--model", name])
            for name in OTHERS
        ],
        (ONE, "strong_scaling", ["--rounds", "5", "--cases", "mlp"]),
        (ONE, "checkpoint", ["--megabytes", "400"]),
        (ONE, "strategies", ["--models", "mlp", "--epochs", "4", "--only", *with_peer]),
        *([(ONE, "rank_memory", [])] if has_horovod else []),
        (ONE, "restart_time", ["--rounds", "5"]),
    ]


def environment(program: str, folder: Path) -> dict[str, str]:
    """One thread a process; PyTorch, where it is installed, for the programs that need it."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    one = {**dict.fromkeys(names, "1"), "TF_NUM_INTEROP_THREADS": "2"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**os.environ, **one, **root}
    if program.endswith("_torch"):
        env["PYTHONPATH"] = os.pathsep.join([str(folder / "torch"), env.get("PYTHONPATH", "")])
    return env


def run(command: list[str], env: dict[str, str]) -> str:
    """Run a program; return what it says last if it fails."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too, so that no other waits
            return f"not done after {TIMEOUT} s"
    if process.returncode == 0:
        return ""
    print(out, err, file=sys.stderr)
    said, _, _ = err.partition("-----")  # what follows is mpirun's
    return (said.strip() or "no message").splitlines()[-1]


def run_all(folder: Path, recorded: Path) -> dict[str, str]:
    """Run the programs; return the last error line of each that failed, whose later turns are
    skipped."""
    failed: dict[str, str] = {}
    for start, name, options in programs():
        if name in failed:
            continue
        began = time.perf_counter()
        file = str(Path(__file__).with_name(f"{name}.py"))
        command = [*start, file, "--results", str(recorded), *options]
        if said := run(command, environment(name, folder)):
            failed[name] = said
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return failed


def machine() -> dict[str, Any]:
    """What the results were measured on and with."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    versions = {}
    for package in ("ktrainer", "keras", "tensorflow", "tensorflow-cpu", "horovod"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "date": date.today().isoformat(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 1),  # of other programs
        "versions": {"python": platform.python_version(), **versions},
    }


def notes(machine: dict[str, Any], failed: dict[str, str]) -> str:
    """What a reader of the table must know: where it was measured, whether the machine was idle,
    and what is missing."""
    load, cpus = machine["load_before"], machine["cpus"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"Measured on {machine['date']}: {cpus} cores ({machine['cpu']}), {versions}. All programs "
        f"took {machine['minutes']} minutes."
    ]
    lines += [f"`{name}.py` failed: {said}" for name, said in failed.items()]
    if "horovod" not in machine["versions"]:
        lines.append("Horovod is not installed: what is compared with it is missing.")
    if load > cpus / 4:
        lines.append(
            f"Other programs kept the machine busy (load {load} on {cpus} CPUs): measure again."
        )
    return "".join(f"\n{line}\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, help="put the table between the marks of this page")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    recorded = folder / "results.jsonl"
    recorded.write_text("")
    measured_on = machine()
    began = time.monotonic()
    failed = run_all(folder, recorded)
    measured_on["minutes"] = round((time.monotonic() - began) / 60)
    results = collect(recorded)
    text = table(results) + notes(measured_on, failed)
    write_json(folder / "results.json", results, {**measured_on, "failed": failed})
    draw(folder / "results.svg", results)
    if args.page:
        put_into(args.page, text)
    print(text)


if __name__ == "__main__":
    main()
