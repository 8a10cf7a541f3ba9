"""How long the loss of a rank delays training: until the error, the next update, or a restart.

    python benchmarks/faults.py [--ranks 3] [--rounds 3] [--width 800]

Data-parallel ranks train a network of about 1.6 million weights with Adam, and the last of them is
killed (SIGKILL) in mid-run. `error`: without healing, until all have ended and the launcher has
said why. `heal`: until the next update is finished without it. `restart`: until the first update
after `--max-restarts` has started all of them again from a checkpoint, and how much of that is from
a process's start on: importing TensorFlow, building, restoring, compiling. Shown is the median of
the rounds, and all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = {
    "error": [],
    "heal": ["--heal"],
    "restart": ["--max-restarts", "1", "--backoff", "0.01"],
}
KILL_AT = 30  # updates
STEPS = 60


def train(folder: Path, width: int, words: list[str]) -> None:
    """Train in this process; write down when each update was finished."""
    import psutil

    from ktrainer import Callback, Trainer

    trainer = Trainer(overrides=words)
    import keras
    import numpy as np

    began = psutil.Process().create_time()
    notes = (folder / f"{trainer.world.rank}-{os.getpid()}").open("w", buffering=1)

    class Notes(Callback):
        def on_step_checkpoint(self, step: int, logs: dict | None = None) -> None:
            notes.write(json.dumps({"now": time.time(), "began": began, "step": step}) + "\n")
            time.sleep(0.02)

    layers = [keras.Input((width,)), *(keras.layers.Dense(width, "tanh") for _ in range(2))]
    model = keras.Sequential([*layers, keras.layers.Dense(width // 2)])
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(64, width)).astype("float32")
    trainer.fit(model, (x, x[:, : width // 2]), callbacks=[Notes()])


def lines(folder: Path) -> list[dict[str, float]]:
    """Read what all processes have noted, with the process's id."""
    found = []
    for path in folder.iterdir():
        for text in path.read_text().splitlines():
            found.append({"pid": int(path.name.partition("-")[2]), **json.loads(text)})
    return found


def measure(way: str, ranks: int, width: int) -> tuple[float, float]:
    """Seconds since the rank was killed; and those of them since the slowest process started."""
    with tempfile.TemporaryDirectory() as name:
        notes, run = Path(name, "notes"), Path(name, "run")
        notes.mkdir()
        words = ["backend=data_parallel", "logging.progress=none", "data.batch_size=64"]
        words += [f"trainer.max_steps={STEPS}", f"trainer.epochs={STEPS}", f"run.dir={run}"]
        words += ["checkpoint.every=10ba"] if way == "restart" else []
        command = [
            sys.executable,
            "-m",
            "ktrainer.cli.main",
            "launch",
            "-n",
            str(ranks),
            "--no-check",
        ]
        command += [*WAYS[way], __file__, "--train", str(notes), str(width), *words]
        with Path(name, "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            victim = str(ranks - 1)
            while not any(
                line.get("step", 0) >= KILL_AT
                for path in notes.glob(f"{victim}-*")
                for line in map(json.loads, path.read_text().splitlines())
            ):
                if process.poll() is not None:
                    sys.exit(Path(name, "log").read_text())
                time.sleep(0.005)
            (path,) = notes.glob(f"{victim}-*")
            os.kill(int(path.name.partition("-")[2]), signal.SIGKILL)
            killed = time.time()
            code = process.wait()
            ended = time.time()
        if way == "error":
            return ended - killed, 0.0
        if code:
            sys.exit(Path(name, "log").read_text())
        return _since(killed, lines(notes), int(path.name.partition("-")[2]), way == "heal")


def _since(
    killed: float, noted: list[dict[str, float]], victim: int, heal: bool
) -> tuple[float, float]:
    """When the update was finished by all that the victim did not live to finish."""
    if heal:
        first = 1 + max(line["step"] for line in noted if line["pid"] == victim)
        done = [line for line in noted if line["step"] == first]
    else:
        new = [line for line in noted if line["began"] > killed]
        first = min(line["step"] for line in new)
        done = [line for line in new if line["step"] == first]
    end = max(line["now"] for line in done)
    return end - killed, end - min(line["began"] for line in done)


def main() -> None:
    """Measure each way a few times."""
    if "--train" in sys.argv:
        at = sys.argv.index("--train")
        folder, width, *words = sys.argv[at + 1 :]
        train(Path(folder), int(width), [word for word in words if "=" in word])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=800)
    args = parser.parse_args()
    for way in WAYS:
        found = [measure(way, args.ranks, args.width) for _ in range(args.rounds)]
        every = ", ".join(f"{seconds:.3f}" for seconds, _ in found)
        text = f"{way:8} {statistics.median(s for s, _ in found):7.3f} s  ({every})"
        if way == "restart":
            text += f", {statistics.median(s for _, s in found):.3f} s from a process's start on"
        print(text, flush=True)


if __name__ == "__main__":
    main()
