"""The same training on one, two and four processes, as a pipeline, and with a killed rank: a chart.

    python benchmarks/loss_curves.py docs/images/loss_curves.svg

Trains a small convolutional network on scikit-learn's digits five times in float32, through
`ktrainer run`, and draws the validation loss of each run and its difference from one process.
In the last run rank 2 of four is killed with SIGKILL in the middle, and the others continue.
Prints the largest relative difference of each run. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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


def launch(options: list[str], words: list[str], folder: Path) -> Curve:
    """Run one training through `ktrainer run`; return its validation loss."""
    command = [sys.executable, "-m", "ktrainer.cli.main", "run", *options, __file__, "train"]
    subprocess.run([*command, *words, *SETTINGS, f"run.dir={folder}"], check=True)
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
    one = curves["1 process"][1]
    styles = zip(curves.items(), (7, 5, 3.4, 2, 1), ("-", "-", "-", "-", "--"), strict=True)
    colors = ("#cfd8e3", "#8ecae6", "#219ebc", "#fb8500", "#023047")
    for ((label, (steps, losses)), width, style), color in zip(styles, colors, strict=True):
        above.plot(steps, losses, style, lw=width, color=color, label=label)
        if label != "1 process":
            apart = [abs(a - b) / b for a, b in zip(losses, one, strict=True)]
            below.semilogy(steps, [max(a, 1e-9) for a in apart], lw=1.2, color=color, label=label)
    above.axvline(KILL_AT, color="#d00000", lw=0.8, ls=":")
    above.annotate("rank 2 of 4 is killed", (KILL_AT, above.get_ylim()[1] * 0.8), color="#d00000")
    above.set(ylabel="validation loss")
    above.legend(frameon=False)
    below.set(xlabel="updates", ylabel="relative\ndifference", ylim=(1e-9, 1e-3))
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", type=Path, nargs="+", help="files to write, .svg or .png")
    pictures = parser.parse_args().pictures
    with tempfile.TemporaryDirectory() as folder:
        curves = {
            label: launch(options, words, Path(folder, label.replace(" ", "-")))
            for label, (options, words) in RUNS.items()
        }
    one = curves["1 process"][1]
    for label, (_, losses) in curves.items():
        apart = max(abs(a - b) / b for a, b in zip(losses, one, strict=True))
        print(f"{label:<26} loss {losses[-1]:.6f}   largest difference {apart:.1e}")
    for picture in pictures:
        draw(curves, picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
    else:
        main()
