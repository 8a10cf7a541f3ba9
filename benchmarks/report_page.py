"""A report of a run that was disturbed, as a page and as a picture.

    python benchmarks/report_page.py FOLDER [docs/images/report.png]

Trains the digits example on four processes with `--heal` and `--max-restarts`: two ranks are
killed, and the others continue; then the rest is killed and starts again from a checkpoint. Writes
the run, and a page about it, into FOLDER; with Chromium installed, also a picture of the page.
Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KILLED = {150: 3, 270: 1}  # before these updates, rank 3 of four, then rank 1 of three
ALL_KILLED = 400  # before this update, every rank
SETTINGS = [
    "backend=data_parallel",
    "trainer.epochs=12",
    "data.batch_size=32",
    "logging.every=2ba",
    "trainer.validate_every=15ba",
    "checkpoint.every=1ep",
    "seed=1",
    "logging.progress=none",
]
SIZE = (1180, 985)  # of the picture


def train(words: list[str]) -> None:
    """Train in this process, one of those of the run."""
    from ktrainer import Callback, Trainer
    from ktrainer.distributed import restart_records

    sys.path.insert(0, str(EXAMPLES))
    import digits

    class KillRanks(Callback):
        def on_step_begin(self, step: int) -> None:
            lost = KILLED.get(step) == self.world.rank and self.world.size > 2
            if restart_records.count() == 0 and (lost or step == ALL_KILLED):
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer.from_cli([KillRanks()], argv=words)
    data, validation = digits.load_split()
    trainer.fit(digits.build_model, data, validation_data=validation)


def photograph(page: Path, picture: Path) -> None:
    """Write what Chromium shows of a page."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        sys.exit("a picture needs Chromium: apt-get install chromium")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += ["--disable-background-networking", "--log-level=3"]
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    with tempfile.TemporaryDirectory() as profile:
        words += [size, f"--user-data-dir={profile}", f"--screenshot={picture.absolute()}"]
        subprocess.run([program, *words, page.absolute().as_uri()], check=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the run; it must not exist")
    parser.add_argument("picture", type=Path, nargs="?", help="PNG to write")
    given = parser.parse_args()
    launch = [sys.executable, "-m", "ktrainer.cli.main"]
    options = ["run", "-n", "4", "--heal", "--max-restarts", "1"]
    words = ["train", *SETTINGS, f"run.dir={given.folder}"]
    subprocess.run([*launch, *options, __file__, *words], check=True)
    subprocess.run([*launch, "report", str(given.folder)], check=True)
    if given.picture is not None:
        photograph(given.folder / "report.html", given.picture)


if __name__ == "__main__":
    train(sys.argv[2:]) if sys.argv[1:2] == ["train"] else main()
