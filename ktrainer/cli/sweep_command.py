"""`ktrainer sweep SCRIPT key=SPACE ...`: try settings, in trials that Optuna chooses."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktrainer.checkpoint.best_metric import is_loss
from ktrainer.cli.launch_options import add_script, add_size_options, positive
from ktrainer.cli.run_command import recorded_signals
from ktrainer.cli.sweep_runs import OUTPUT, Outcome, outcome, output_end, run_trial, trial_folder
from ktrainer.cli.sweep_words import SweepWords, file_digest
from ktrainer.errors import RUN_AGAIN, ConfigError, SetupError
from ktrainer.runtime.folder_lock import FolderLock
from ktrainer.tuning.search_space import grid_size

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from ktrainer.cli.sweep_results import SweepResults
    from ktrainer.tuning.sweep_study import SweepStudy

_SAMPLERS = ("tpe", "random", "grid")
_PRUNERS = ("median", "halving", "hyperband", "none")
_STARTS = 3  # of a trial whose processes are killed
_USAGE, _SIGNAL = 2, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer sweep`."""
    parser.description = (
        "Train a script again and again with other settings, which Optuna chooses, and show which "
        "are best. Spaces follow the script: key=a,b,c, key=log(low,high), key=uniform(low,high), "
        "key=int(low,high), in quotes for the shell; key=value is the same in all trials. Trials "
        "run one after the other, each on all the processes that -n says, with its run in "
        "DIR/trial-0003. The same command again continues a sweep that was ended in whatever way, "
        "with a larger --trials by more of them."
    )
    _add_options(parser)
    add_script(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_size_options(parser)
    _add_sweep_options(parser)
    _add_search_options(parser)


def _add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Declare what is compared, and where it is kept."""
    parser.add_argument(
        "--trials",
        type=positive(int),
        help="how many there are in all (default: 20; with --sampler grid all combinations)",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", default=Path("sweep"), help="folder (default: sweep)"
    )
    parser.add_argument(
        "--metric", help="what is best (default: val_loss, or loss where nothing is validated)"
    )
    parser.add_argument(
        "--mode",
        choices=["min", "max"],
        help="whether a low or a high value of it is better (default: min for a loss, max for an "
        "accuracy)",
    )
    parser.add_argument(
        "--storage", metavar="URL", help="of a database for Optuna (default: a file in DIR)"
    )


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    """Declare what chooses the trials, and what ends them."""
    parser.add_argument(
        "--sampler",
        choices=_SAMPLERS,
        default="tpe",
        help="what chooses the values: tpe learns from the trials before (default), grid tries all",
    )
    parser.add_argument(
        "--pruner",
        choices=_PRUNERS,
        default="median",
        help="what ends trials early: by default those worse than the median of the others at the "
        "same epoch, after five trials",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampler (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Run the trials that are missing, and show all.

    Returns:
        The exit status: 0; 1 where no trial has finished; 2 where the first trial says that none
        can work; after a signal 75 if the trial can resume from a checkpoint, else 128 plus the
        signal's number.

    Raises:
        ConfigError: the words cannot work, or the folder has another sweep.
        SetupError: Optuna is missing, or its storage does not answer.
    """
    read_later_options(args)
    if not Path(args.script).is_file():
        raise ConfigError(
            f"there is no script {args.script!r}; give the path from the current folder"
        )
    mode = args.mode or _mode_of(args.metric)
    words = SweepWords.read(args)
    most = grid_size(words.spaces) if args.sampler == "grid" else 20
    args.trials = args.trials or most
    words.check()
    if find_spec("optuna") is None:
        raise SetupError(
            'ktrainer sweep needs Optuna: in the checkout of ktrainer, pip install ".[sweep]".'
        )
    from ktrainer.cli.sweep_results import SweepResults
    from ktrainer.tuning.sweep_study import OptunaError, answering

    with _folder(args.dir) as folder:
        study = _open_study(args, words, folder, mode)
        results = SweepResults(study, words, folder, args.metric, mode)
        if hint := words.hint(args.sampler, args.trials):
            _say(hint)
        with answering(args.storage, OptunaError):
            return _Sweep(args, words, folder, study, results, mode).run()


def read_later_options(args: argparse.Namespace) -> None:
    """Set the options that follow the script, up to `--`; the other words are kept."""
    later = argparse.ArgumentParser(prog="ktrainer sweep", allow_abbrev=False, add_help=False)
    _add_options(later)
    end = args.args.index("--") if "--" in args.args else len(args.args)
    _, words = later.parse_known_args(args.args[:end], args)
    args.args = [*words, *args.args[end:]]


def _mode_of(metric: str | None) -> str:
    if metric is None or is_loss(metric):
        return "min"
    if metric.endswith("accuracy"):
        return "max"
    raise ConfigError(
        f"it is not known whether a low or a high {metric} is better: add --mode min or --mode max."
    )


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder of the sweep, which no other sweep uses meanwhile."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(path, "folder of the sweep")
    except SetupError:
        raise ConfigError(
            f"another `ktrainer sweep` works in {path}: wait for its end, or give this one another "
            "folder, by --dir DIR."
        ) from None
    except OSError as error:
        raise SetupError(f"the folder {path} cannot be used: {error.strerror or error}.") from None
    try:
        yield path
    finally:
        lock.release()


def _open_study(args: argparse.Namespace, words: SweepWords, folder: Path, mode: str) -> SweepStudy:
    from ktrainer.tuning.sweep_study import FILE, SECRET, SweepStudy, storage_in

    settings = {
        "script": str(Path(args.script).resolve()),
        "words": words.redacted(),
        SECRET: words.digest(),
        "number of processes": words.ranks,
        "number of workers": words.workers,
        "metric": args.metric,
        "mode": mode,
        "sampler": args.sampler,
        "pruner": args.pruner,
        "seed": args.seed,
    }
    if words.config is not None:
        settings[FILE] = file_digest(words.config)
    # Hyperband's choices depend on the name, so sweeps with files of their own share one.
    storage, name = args.storage, f"ktrainer {folder.absolute()}"
    if storage is None:
        storage, name = storage_in(folder), "sweep"
    study = SweepStudy(storage, name, settings, words.spaces)
    if not study.trials and any(folder.glob("trial-*")):
        study.forget()
        raise ConfigError(
            f"{folder} has trials that this storage does not know, which new ones would continue: "
            "give another folder, by --dir DIR."
        )
    if not study.is_as_begun("digest of the script", file_digest(args.script)):
        _say(
            f"{args.script} has changed since this sweep began. Trials before and after the change "
            "may not compare; --dir DIR begins another sweep."
        )
    return study


class _Sweep:
    """The trials, one after the other."""

    def __init__(
        self,
        args: argparse.Namespace,
        words: SweepWords,
        folder: Path,
        study: SweepStudy,
        results: SweepResults,
        mode: str,
    ) -> None:
        self._args, self._words, self._folder = args, words, folder
        self._study, self._results, self._mode = study, results, mode

    def run(self) -> int:
        with recorded_signals() as signals:
            while not signals:
                trial = self._study.next_trial(self._args.trials)
                if trial is None:
                    break
                code = self._run(trial, signals)
                if code:
                    return code
        if signals:
            return self._interrupted(_SIGNAL + signals[0])
        self._results.write_page()
        print(self._results.table())
        return 0 if self._results.best is not None else 1

    def _run(self, trial: FrozenTrial, signals: list[int]) -> int:
        """Run a trial and record its outcome; return the exit code that ends the sweep, 0 to
        continue."""
        folder = self._folder / trial_folder(trial.number)
        _say(f"trial {trial.number}: {' '.join(self._words.of_trial(trial.params))}")
        for start in range(_STARTS):
            code = self._start(trial, folder, signals)
            if signals and code != 0:
                return self._interrupted(code)
            killed = code == RUN_AGAIN or code > _SIGNAL
            if not killed or start == _STARTS - 1:
                break
            _say(f"trial {trial.number}: killed (exit status {code}); it is started again")
        if code == _USAGE and trial.number == 0:
            return self._refused(folder)
        self._record(trial, outcome(folder, code, self._args.metric, self._mode))
        return 0

    def _start(self, trial: FrozenTrial, folder: Path, signals: list[int]) -> int:
        from ktrainer.tuning.sweep_trial import SweepTrial

        request = SweepTrial(
            str(folder.absolute()),
            trial.number,
            tuple(space.key for space in self._words.spaces),
            self._args.metric,
            self._args.pruner,
            self._study.storage,
            self._study.name,
        )
        words = self._words.launch(trial.params)
        return run_trial(words, folder, request.to_environment(), signals)

    def _record(self, trial: FrozenTrial, came: Outcome) -> None:
        facts: dict[str, Any] = {"metric": came.metric, "epochs": came.epochs, "why": came.why}
        found = self._study.finish(trial.number, came.state, came.value, **facts)
        value = "" if found is None else f", {came.metric} {found:.5g}"
        why = f": {came.why}" if came.why else ""
        _say(f"trial {trial.number}: {came.state}{value}{why}")
        self._results.write_page()

    def _refused(self, folder: Path) -> int:
        """End the sweep as if it had not begun: what the first trial says is true of all."""
        sys.stderr.write(output_end(folder))
        kept = folder.with_name("refused")  # no later trial may resume from what is in it
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        self._study.forget()  # last: killed before, the same trial is tried, and refused, again
        _say(f"no trial can work like this, so the sweep ends; the output is in {kept / OUTPUT}")
        return _USAGE

    def _interrupted(self, code: int) -> int:
        self._results.write_page()
        _say("interrupted; the same command again continues, with the trial that was not finished")
        if self._results.best is not None:
            _say(self._results.best.text())
        return code


def _say(text: str) -> None:
    print(text, flush=True)
