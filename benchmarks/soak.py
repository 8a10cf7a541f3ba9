"""Training that is disturbed all the time, and ends with the weights of one that is not.

    python benchmarks/soak.py --data-dir DIR --steps 4000 --every 60 one heal restart

Two processes train a small transformer on Shakespeare's plays (`DIR/input.txt`, else downloaded),
first undisturbed, then, in each of the ways named, with a rank, drawn at random, killed every so
many seconds: `heal` lets the others go on and replaces it (`ktrainer run --replace`), `restart`
starts both again from the last checkpoint (`--max-restarts`). Prints how far the weights are apart,
how often a rank was killed, memory over time, and what is left behind. `one` is one process,
undisturbed: it adds the same numbers in another order, as the ranks that heal do, and shows what
rounding (of float64) alone makes of so many updates. `--pause` stretches a run over its time on a
machine that has other work: so many seconds of sleep after each disturbed update.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SETTLE_SECONDS = 5.0  # a process younger than this is left alone; at restarts, than `every`


def train(out: str, pause: float, words: list[str]) -> None:
    """One process of a training; the first writes the weights."""
    sys.path.insert(0, str(EXAMPLES))
    import keras

    from ktrainer import Trainer

    class Pause(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            time.sleep(pause)

    trainer = Trainer(overrides=words)
    keras.config.set_floatx("float64")
    import data
    import shakespeare

    keras.utils.set_random_seed(0)
    folder, _ = data.data_folder()
    x, y = shakespeare.windows(data.shakespeare(folder)[:200_000])

    def build() -> keras.Model:
        # Not Adam: it divides by the gradient's size, so that where that is zero but for rounding
        # (the bias of attention's keys), rounding moves a weight as far as anything else does.
        model = shakespeare.build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
        return model

    trainer.fit(build, (x, y), callbacks=[Pause()])
    if trainer.world.is_root:
        arrays = [v.numpy() for v in trainer.model.weights]
        np.savez(out, **{str(k): v for k, v in enumerate(arrays)})


def ranks(launcher: psutil.Process) -> list[psutil.Process]:
    """The live processes of a launch that train."""
    found = []
    for process in launcher.children(recursive=True):
        try:
            if "ktrainer.launch.rank_process" in process.cmdline() and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return [p for p in found if Path(p.exe()).name.startswith("python")]


class Disturber(threading.Thread):
    """Kills a rank now and then, and notes how much memory the ranks take."""

    def __init__(self, launcher: int, every: float, settled: float) -> None:
        super().__init__(daemon=True)
        self.launcher, self.every, self.settled = psutil.Process(launcher), every, settled
        self.kills: list[float] = []
        self.memory: list[tuple[float, float]] = []
        self.began, self.over = time.monotonic(), threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self.over.wait(1.0):
            try:
                alive = ranks(self.launcher)
                used = [p.memory_info().rss / 2**20 for p in alive]
                now = time.monotonic()
                if used:
                    self.memory.append((now - self.began, max(used)))
                settled = max(SETTLE_SECONDS, self.settled)
                old = [p for p in alive if time.time() - p.create_time() > settled]
                if self.every and now - last > self.every and len(old) == 2:
                    random.choice(old).kill()
                    self.kills.append(now - self.began)
                    last = now
            except psutil.Error:
                continue


CALM = {"calm": ["-n", "2"], "one": ["-n", "1"]}
DISTURBED = {"heal": ["-n", "2", "--replace"], "restart": ["-n", "2", "--max-restarts", "1000"]}


def launch(args: argparse.Namespace, folder: Path, name: str) -> Disturber:
    """Run a training to its end."""
    words = [
        *(f"trainer.max_steps={args.steps}", "trainer.epochs=100000", f"run.dir={folder / name}"),
        *("checkpoint.every=10ba", "backend=data_parallel", "logging.progress=none"),
        *("data.batch_size=16", "world.deadline=60"),
    ]
    more = ["--data-dir", args.data_dir] if args.data_dir else []
    command = [sys.executable, "-m", "ktrainer.cli.main", "launch", "--no-check"]
    command += (CALM | DISTURBED)[name]
    pause = 0.0 if name in CALM else args.pause
    command += [__file__, "--train", str(folder / f"{name}.npz"), str(pause), *more, *words]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})
        disturber = Disturber(
            process.pid,
            every=0.0 if name in CALM else args.every,
            settled=args.every if name == "restart" else 0.0,
        )
        disturber.start()
        code = process.wait()
    disturber.over.set()
    disturber.join()
    seconds = time.monotonic() - disturber.began
    print(f"{name}: {seconds:.0f} s, {len(disturber.kills)} killed, exit code {code}", flush=True)
    if code:
        print((folder / f"{name}.log").read_text()[-3000:])
    return disturber


def report(folder: Path, name: str, disturbed: Disturber) -> None:
    """How far the two runs are apart, and what is left of them."""
    with np.load(folder / "calm.npz") as one, np.load(folder / f"{name}.npz") as other:
        gaps = [float(np.max(np.abs(one[k] - other[k]) / _scale(one[k]))) for k in one]
    equal = all(gap == 0 for gap in gaps)
    print(f"weights: largest difference {max(gaps):.1e} of a variable's largest value")
    print("         bitwise equal" if equal else "         not bitwise equal")
    memory = [used for _, used in disturbed.memory]
    quarter = max(1, len(memory) // 4)
    print(
        f"memory:  {max(memory[quarter : 2 * quarter]):.0f} MB in the second quarter of the time,"
    )
    print(f"         {max(memory[-quarter:]):.0f} MB in the last")
    print(f"left:    {len(psutil.Process().children(recursive=True))} processes, ", end="")
    temporary = [p for p in (folder / name).rglob("*") if ".tmp" in p.name]
    folders = left_behind(disturbed.launcher.pid)
    print(f"{len(folders)} shared or private folders, {len(temporary)} half-written")


def _scale(array: np.ndarray) -> float:
    """The largest value; at least 1e-3, for a weight may be nothing but rounding itself."""
    return max(float(np.max(np.abs(array))), 1e-3)


def left_behind(launcher: int) -> list[Path]:
    """Folders that a launch should have taken away."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return [path for place in places for path in place.glob(f"ktrainer-*-{launcher}-*")]


def main() -> None:
    """Train undisturbed and disturbed, and compare."""
    if "--train" in sys.argv:
        at = sys.argv.index("--train")
        out, pause, *words = sys.argv[at + 1 :]
        train(out, float(pause), [word for word in words if "=" in word])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("how", nargs="+", choices=["one", *DISTURBED])
    parser.add_argument("--steps", type=int, default=1000, help="updates in all")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two deaths")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each update")
    parser.add_argument("--data-dir", help="where input.txt is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch(args, folder, "calm")
        for way in args.how:
            report(folder, way, launch(args, folder, way))


if __name__ == "__main__":
    main()
