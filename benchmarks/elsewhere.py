"""What goes wrong elsewhere and not here, measured again.

    python benchmarks/elsewhere.py

Prints a Markdown table: the case, Horovod's Keras layer or Keras' own `fit` (under
MirroredStrategy, but for the last case), and ktrainer on the same model and data. Horovod and
ktrainer run in two MPI processes, MirroredStrategy on two logical CPU devices of one process. "dw"
is the largest difference of any weight from training in one process with plain Keras.

Each case runs in processes of its own, since some end with an error or not at all. What to run
is in benchmarks/elsewhere_cases.py; here are the starting, the comparing and the printing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.launch.mpirun_command import find_mpirun, mpi_environment, mpirun_command

SECONDS = 240  # for one case; none takes a tenth of it on an idle machine
CASES = Path(__file__).with_name("elsewhere_cases.py")

Results = list[dict[str, Any]]  # what each rank found; empty if it did not come to an end


def run(name: str, how: str, ranks: int) -> Results:
    """Run one case in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(CASES), name, how, folder]
        if ranks > 1:
            root = os.geteuid() == 0
            command = mpirun_command(ranks, command, mpirun=find_mpirun(), root=root)
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment(), stdout=out, stderr=out, start_new_session=True
            )
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 15)
                process.wait(30)
        found = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("rank*.json"))]
        if len(found) < ranks and not any("hung" in f for f in found):
            last = log.read_text(errors="replace").splitlines()[-20:]
            print(f"{name}, {how}: no result", *last, sep="\n", file=sys.stderr)
        return found


def environment() -> dict[str, str]:
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    return {**os.environ, **mpi_environment(), **one_thread}


def weights(results: Results, rank: int = 0) -> np.ndarray:
    return np.array(results[rank]["weights"])


def moved(results: Results) -> np.ndarray:
    """How far one update moved the weights."""
    return weights(results) - np.array(results[0]["before"])


def distance(a: np.ndarray, b: np.ndarray) -> str:
    return not_a_number(a) or f"dw {np.abs(a - b).max():.1e}"


def not_a_number(values: Any, what: str = "weights") -> str:
    bad = np.mean(~np.isfinite(values))
    return f"{bad:.0%} of the {what} are NaN" if bad else ""


def between_ranks(results: Results) -> str:
    difference = np.abs(weights(results, 0) - weights(results, 1)).max()
    same = results[0]["weights"] == results[1]["weights"]
    return "ranks equal, bit for bit" if same else f"ranks differ by {difference:.2g}"


def area(results: Results, one: Results) -> str:
    error, value = results[0].get("error"), results[0]["auc"]
    averaged = f"{error}; averaged by hand: " if error else ""
    return f"{averaged}{value:.4f} (exact: {one[0]['auc']:.4f})"


Cell = Callable[[Results, Results], str]  # of a run and of the one in plain Keras

# (case, its name in elsewhere_cases.py, the other side, what its cell says)
TABLE: list[tuple[str, str, str, Cell]] = [
    (
        "`DistributedOptimizer`: two ranks, different data, one epoch",
        "optimizer",
        "horovod",
        lambda r, _: between_ranks(r),
    ),
    (
        "broadcasting initial weights that differ",
        "broadcast",
        "horovod",
        lambda r, _: r[0].get("error") or between_ranks(r),
    ),
    (
        "`MetricAverageCallback`: AUC over two ranks",
        "auc",
        "horovod",
        area,
    ),
    (
        "a loop by hand; one rank has a batch more than the other",
        "uneven_ranks",
        "horovod",
        lambda r, _: (
            f"still waiting after {r[0]['hung']:g} s" if "hung" in r[0] else "trains on all of it"
        ),
    ),
    (
        "`global_clipnorm=0.1`: length of one update",
        "global_clipnorm",
        "mirrored",
        lambda r, _: f"{np.linalg.norm(moved(r)):.4f}",
    ),
    (
        "`clipvalue=0.01`: largest element of one update",
        "clipvalue",
        "mirrored",
        lambda r, _: f"{np.abs(moved(r)).max():.4f}",
    ),
    (
        "241 examples in batches of 32: uneven last batch",
        "uneven_batch",
        "mirrored",
        lambda r, one: distance(weights(r), weights(one)),
    ),
    (
        "225 examples in batches of 32: a last batch of 1",
        "batch_of_one",
        "mirrored",
        lambda r, one: distance(weights(r), weights(one)),
    ),
    (
        "the same, with `BatchNormalization(synchronized=True)`",
        "synchronized_of_one",
        "mirrored",
        lambda r, one: distance(weights(r), weights(one)),
    ),
    (
        "the same, with plain `BatchNormalization()`",
        "batch_norm_of_one",
        "mirrored",
        lambda r, _: not_a_number(r[0]["predictions"], "predictions") or "predictions are finite",
    ),
    (
        "`Dropout(0.5)`: units dropped for one of two examples only (expected: 50 %)",
        "dropout",
        "mirrored",
        lambda r, _: f"{r[0]['one_of_two']:.0%}",
    ),
    (
        "3 epochs of 8 batches, of a dataset of unknown length: optimizer iterations",
        "unknown_length",
        "keras",
        lambda r, _: str(r[0]["iterations"]),
    ),
]


ALONE = ("optimizer", "broadcast", "uneven_ranks", "unknown_length")  # compared with no one


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for _, name, _, _ in TABLE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    chosen = parser.parse_args().only
    print("| case | elsewhere | ktrainer |\n|---|---|---|", flush=True)
    for title, name, who, cell in TABLE:
        if name not in chosen:
            continue
        one = run(name, "keras", 1) if name not in ALONE else []
        cells = []
        for how, ranks in ((who, 2 if who == "horovod" else 1), ("ktrainer", 2)):
            results = run(name, how, ranks)
            cells.append(cell(results, one) if results else "no result")
        print(f"| {title} | {who.capitalize()}: {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
