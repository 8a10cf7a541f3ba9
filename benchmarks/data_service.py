"""What a tf.data service gives and costs on one host.

    python benchmarks/data_service.py
    python benchmarks/data_service.py --workers 4 --count 16384 --epochs 4

First `examples/image_files.py`, PNG files (here of noise) with augmentation, in the training
process and on a service with one worker: examples a second, from the end of the first epoch on.
Then a pipeline that computes nothing, batches of `--rows` rows of 64 numbers: the time a batch,
read without a service, on one worker in turns, and first come first served by all workers. The
reads take turns, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ktrainer import Trainer  # noqa: F401 - before TensorFlow, so that it starts quietly

# isort: split
import numpy as np
import tensorflow as tf

from ktrainer.config import DataConfig, DataServiceConfig
from ktrainer.data import make_feed
from ktrainer.distributed import SingleWorld

EXAMPLE = Path(__file__).parents[1] / "examples" / "image_files.py"
DEADLINE = 120.0  # seconds in which a service must be ready


@contextmanager
def service(folder: Path, workers: int) -> Iterator[str]:
    """The file of a service that runs inside the block."""
    path = folder / f"service-{workers}.json"
    words = ["data-service", "-n", str(workers), "--config", str(path)]
    command = [sys.executable, "-m", "ktrainer.cli.main", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + DEADLINE
        while not path.exists():
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the service did not start; run it by hand: " + " ".join(words))
            time.sleep(0.1)
        yield str(path)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def write_images(folder: Path, count: int) -> None:
    """Files of the size of MNIST's, as the example reads them: LABEL/NUMBER.png."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / str(number % 10) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = random.integers(0, 256, (28, 28, 1), np.uint8)
        path.write_bytes(tf.io.encode_png(image).numpy())


def examples_a_second(folder: Path, args: argparse.Namespace, *words: str) -> int:
    """What the example prints."""
    given = ["--images", str(folder / "images")]
    given += [f"trainer.epochs={args.epochs}", "logging.progress=none"]
    given += [f"run.dir={tempfile.mkdtemp(dir=folder)}", *words]
    command = [sys.executable, str(EXAMPLE), *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"(\d+) examples a second", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


def milliseconds_a_batch(args: argparse.Namespace, **keys: Any) -> float:
    """The time of a pass over a pipeline that computes nothing, after its first batch."""
    data = tf.data.Dataset.from_tensors(tf.zeros([args.rows, 64])).repeat(args.batches)
    config = DataConfig(service=DataServiceConfig(**keys))
    with closing(make_feed(data, world=SingleWorld(), config=config, training=True)) as feed:
        batches = feed.read(0)
        next(batches)
        begin = time.perf_counter()
        count = sum(1 for _ in batches)
        return (time.perf_counter() - begin) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4096, help="image files")
    parser.add_argument("--epochs", type=int, default=3, help="of the example; not the first")
    parser.add_argument("--workers", type=int, default=2, help="of first come first served")
    parser.add_argument("--rows", type=int, default=64, help="of a trivial batch")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_images(folder / "images", args.count)
        with service(folder, 1) as one, service(folder, args.workers) as several:
            served = f"data.service.config={one}"
            print("image files                              examples/s")
            print(f"  in the training process                {examples_a_second(folder, args):10,}")
            found = examples_a_second(folder, args, served)
            print(f"  on a service, one worker               {found:10,}", flush=True)
            ways: dict[str, dict[str, Any]] = {
                "without a service": {},
                "on one worker, in turns": {"config": one},
                f"{args.workers} workers, first come": {"config": several, "round_robin": False},
            }
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(args.repeats):
                for name, keys in ways.items():
                    best[name] = min(best[name], milliseconds_a_batch(args, **keys))
            print("a pipeline that computes nothing           ms/batch")
            for name, value in best.items():
                print(f"  {name:39}{value:10.3f}")


if __name__ == "__main__":
    main()
