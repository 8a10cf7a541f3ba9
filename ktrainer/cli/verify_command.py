"""`ktrainer verify -n 2 SCRIPT key=value ...`: compare a run with one in a single process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ktrainer.cli import run_command
from ktrainer.cli.launch_config import checked_config
from ktrainer.cli.launch_options import add_script, add_size_options, positive, process_count
from ktrainer.cli.main import parse_words
from ktrainer.cli.script_trial import launch_options, run_script
from ktrainer.errors import ConfigError
from ktrainer.launch.launch_folders import private_folder
from ktrainer.verify.compare_runs import Comparison, compare, load
from ktrainer.verify.verify_mode import VerifyRun, refuse_own_batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer verify`."""
    parser.description = (
        "Run the first updates of a script's first fit twice, from the same weights and data: in "
        "one process with the batch unsplit, and as configured. Print by how much loss, metrics, "
        "gradients and weights differ; the exit status is 1 if it is more than rounding. Random "
        "layers draw the same for each example in both. The script ends after these updates, and "
        "no files of the run are kept."
    )
    add_size_options(parser)
    parser.add_argument("--steps", type=positive(int), help="updates to compare (default: 2)")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the two runs; return the exit status.

    Raises:
        ConfigError: the configuration cannot work, or the script does not train.
    """
    given, script = vars(args), [args.script, *args.args]
    options = launch_options(given)
    _check([*options, *script])
    with private_folder() as name:
        folder, steps = Path(name), args.steps or 2
        alone = launch_options({**given, "ranks": 1, "workers": None, "servers": None})
        _run(VerifyRun("unsplit", name, steps), [*alone, *script], "in one process")
        _run(VerifyRun("split", name, steps), [*options, *script], "as configured")
        found = compare(load(folder, "unsplit"), load(folder, "split"), load(folder, "initial"))
    if not (found.rows or found.missing):
        raise ConfigError(
            "fit has made no update, so there is nothing to compare: a callback stops it as it "
            "begins, or trainer.max_time is over. Verify without that."
        )
    print(_report(found, args))
    return 0 if found.equal else 1


def _check(words: Sequence[str]) -> None:
    """Refuse a configuration that cannot be launched or verified, before anything runs.

    Raises:
        ConfigError: the configuration cannot work, or has no unsplit equivalent.
    """
    parser = argparse.ArgumentParser(prog="ktrainer verify", allow_abbrev=False)
    run_command.add_arguments(parser)
    args = parse_words(parser, words)
    config = checked_config(args.script, args.args, args.ranks or 1, args.workers, {})
    if config is not None:
        refuse_own_batches(config)


def _report(found: Comparison, args: argparse.Namespace) -> str:
    size = process_count(args)
    processes = "1 process" if size == 1 else f"{size} processes"
    if found.equal:
        last = (
            f"equal: {found.updates} updates as configured, in {processes}, are those of one "
            "process with the batch unsplit, but for rounding."
        )
    else:
        wrong = sum(row.differs for row in found.rows)
        last = f"different: {wrong} of {len(found.rows)} items, in {processes}. {found.cause}"
    return f"{found}\n\n{last}"


def _run(verify_run: VerifyRun, words: list[str], how: str) -> None:
    """Run the script; show its output only if it fails.

    Raises:
        ConfigError: it fails, or ends without having trained.
    """

    def has_recorded() -> bool:
        return bool(list(Path(verify_run.folder).glob(f"{verify_run.role}-*.npz")))

    unanswered = (
        'verify: call it at the top level or under `if __name__ == "__main__"`. train_on_batch is '
        "not recorded, and health.verify does not check it either: to check its step, train on "
        "some of its batches by fit."
    )
    environment = verify_run.to_environment()
    run_script("ktrainer verify", words, environment, has_recorded, unanswered, how)
