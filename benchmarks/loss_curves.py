"""The same training on one, two and four processes, as a pipeline, and with a killed rank: a chart.

    python benchmarks/loss_curves.py docs/images/loss_curves.svg
    python benchmarks/loss_curves.py --compression MNIST_FOLDER compression.svg

Trains a small convolutional network on scikit-learn's digits five times in float32, through
`ktrainer run`, and draws the validation loss of each run and its difference from one process.
In the last run rank 2 of four is killed with SIGKILL in the middle, and the others continue.
Prints the largest relative difference of each run. Takes about a minute on two cores.

With `--compression` two processes train a dense network on MNIST, with each way to send gradients.
Prints the bytes that each process sends in an update, and the loss; and draws the curves. Takes
about two minutes.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KILL_AT = 60  # updates
SETTINGS = [
    "trainer.epochs=5",
    "data.batch_size=64",
    "trainer.validate_every=2ba",
    "data.drop_remainder=true",
    "seed=1",
    "logging.progress=none",
]

# label -> options of `ktrainer run`, and what is added to the command line.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "1 process": ([], []),
    "2 processes": (["-n", "2"], ["backend=data_parallel"]),
    "4 processes": (["-n", "4"], ["backend=data_parallel"]),
    "pipeline of 2 stages": (
        ["-n", "2"],
        ["backend=pipeline", "backend.partitions=2", "backend.microbatches=4"],
    ),
    "4 processes, one killed": (["-n", "4", "--heal"], ["backend=data_parallel", "kill"]),
}

COMPRESSIONS = ["none", "fp16", "bf16", "powersgd"]
COMPRESSED = ["backend=data_parallel", "trainer.epochs=8", "data.batch_size=64"]
COMPRESSED += ["trainer.validate_every=20ba", "seed=1", "logging.progress=none"]

Curve = tuple[list[int], list[float]]  # updates done, validation loss


def train(words: list[str]) -> None:
    """Train in this process, one of those of a run."""
    from ktrainer import Callback, Trainer

    sys.path.insert(0, str(EXAMPLES))
    import digits
    import keras

    class KillRank(Callback):
        def on_step_begin(self, step: int) -> None:
            if step == KILL_AT and (self.world.rank, self.world.size) == (2, 4):
                os.kill(os.getpid(), signal.SIGKILL)

    def build() -> keras.Model:
        model = digits.build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
        return model

    kills = [KillRank()] if "kill" in words else []
    trainer = Trainer.from_cli(kills, argv=[word for word in words if word != "kill"])
    keras.utils.set_random_seed(1)
    data, validation = digits.load_split()
    trainer.fit(build, data, validation_data=validation)


def train_compressed(folder: str, words: list[str]) -> None:
    """Train in one of two processes; rank 0 writes how many bytes it sent."""
    from ktrainer import Trainer
    from ktrainer.distributed.mpi_gradients import MpiGradients

    sys.path.insert(0, str(EXAMPLES))
    import data
    import keras

    summed, sums = [0], MpiGradients._sum_over_ranks

    def count(self: MpiGradients, array: np.ndarray, what: str) -> None:
        summed[0] += array.nbytes
        sums(self, array, what)

    MpiGradients._sum_over_ranks = count  # type: ignore[method-assign]

    def build() -> keras.Model:
        dense = [keras.layers.Dense(512, "relu") for _ in range(2)]
        flat = keras.layers.Flatten()
        model = keras.Sequential([keras.Input((28, 28, 1)), flat, *dense, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
        return model

    trainer = Trainer.from_cli(argv=words)
    keras.utils.set_random_seed(1)
    examples, validation = data.mnist(Path(folder))
    model = build()
    trainer.fit(model, examples, validation_data=validation)
    if trainer.world.is_root:
        sent = summed[0] * 2 * (trainer.world.size - 1) / trainer.world.size
        (trainer.run_dir / "sent").write_text(str(sent / int(model.optimizer.iterations)))


def compare_compressions(data: Path, pictures: list[Path]) -> None:
    """Train with each compression; print bytes and losses, and draw the curves."""
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in COMPRESSIONS:
            words, run = [f"backend.compression={name}", *COMPRESSED], Path(folder, name)
            curves[name] = launch(["-n", "2"], words, run, ["train", str(data)])
            kilobytes = float((run / "sent").read_text()) / 1000
            losses, middle = curves[name][1], len(curves[name][1]) // 4
            print(
                f"{name:<10} {kilobytes:8.1f} kB an update   loss after a quarter "
                f"{losses[middle]:.4f}, least {min(losses):.4f}, last {losses[-1]:.4f}"
            )
    for picture in pictures:
        draw(curves, picture)


def launch(
    options: list[str], words: list[str], folder: Path, task: Sequence[str] = ("train",)
) -> Curve:
    """Run one training through `ktrainer run`; return its validation loss."""
    command = [sys.executable, "-m", "ktrainer.cli.main", "run", *options, __file__, *task]
    subprocess.run([*command, *words, f"run.dir={folder}"], check=True)
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["event"] == "validation"]
    return [int(row["step"]) for row in rows], [float(row["val_loss"]) for row in rows]


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw all curves on each other, and below them how far they are apart."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "ktrainer", "svg.fonttype": "none", "font.size": 9}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.2), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    (first, (_, one)), *_ = curves.items()
    styles = zip(curves.items(), (7, 5, 3.4, 2, 1), ("-", "-", "-", "-", "--"), strict=False)
    colors = ("#cfd8e3", "#8ecae6", "#219ebc", "#fb8500", "#023047")
    for ((label, (steps, losses)), width, style), color in zip(styles, colors, strict=False):
        above.plot(steps, losses, style, lw=width, color=color, label=label)
        if label != first:
            apart = [abs(a - b) / b for a, b in zip(losses, one, strict=True)]
            below.semilogy(steps, [max(a, 1e-9) for a in apart], lw=1.2, color=color, label=label)
    if list(curves) == list(RUNS):
        above.axvline(KILL_AT, color="#d00000", lw=0.8, ls=":")
        place = (KILL_AT, above.get_ylim()[1] * 0.8)
        above.annotate("rank 2 of 4 is killed", place, color="#d00000")
        below.set_ylim(1e-9, 1e-3)
    above.set(ylabel="validation loss")
    above.legend(frameon=False)
    below.set(xlabel="updates", ylabel="relative\ndifference")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path, nargs="+", help="files to write, .svg or .png")
    parser.add_argument("--compression", type=Path, help="folder of MNIST, to compare on")
    given = parser.parse_args()
    pictures = given.pictures
    if given.compression is not None:
        compare_compressions(given.compression, pictures)
        return
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            label: launch(options, [*words, *SETTINGS], Path(folder, label.replace(" ", "-")))
            for label, (options, words) in RUNS.items()
        }
    one = curves["1 process"][1]
    for label, (_, losses) in curves.items():
        apart = max(abs(a - b) / b for a, b in zip(losses, one, strict=True))
        print(f"{label:<26} loss {losses[-1]:.6f}   largest difference {apart:.1e}")
    for picture in pictures:
        draw(curves, picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"] and Path(sys.argv[2]).is_dir():
        train_compressed(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
    else:
        main()
