"""Whether `ktrainer sweep` runs this process, and what that means for its configuration.

The request is in the environment, as that of `ktrainer lr-find` is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from ktrainer.config import Config
from ktrainer.config.command_line import no_effect

VARIABLE = "KTRAINER_SWEEP"
PRUNED = "the sweep has pruned the trial"  # why its fit has stopped, in its record
_configured = False  # whether a Trainer of this process belongs to the trial


@dataclass(frozen=True)
class SweepTrial:
    """A trial of a sweep.

    Attributes:
        folder: of its run.
        number: of the trial, from 0.
        keys: those that it sets.
        metric: by which trials are compared; None: `metric_of` says.
        pruner: see `ktrainer.tuning.sweep_study`; with `none` the storage is not opened.
        storage: URL of Optuna's storage.
        study: its name there.
    """

    folder: str
    number: int
    keys: tuple[str, ...]
    metric: str | None
    pruner: str
    storage: str
    study: str

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def metric_of(metric: str | None, validated: bool) -> str:
    """The metric by which trials are compared: the one asked for, else the validation loss where
    there is one."""
    return metric or ("val_loss" if validated else "loss")


def current_sweep_trial(environ: Mapping[str, str] = os.environ) -> SweepTrial | None:
    """The trial that this process belongs to; None where there is none."""
    given = environ.get(VARIABLE)
    return SweepTrial(**json.loads(given)) if given else None


def refuse(reason: str) -> NoReturn:
    """End a script with which no trial can work, as a usage error does: that ends the sweep too."""
    print(f"ktrainer sweep: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def configure_for_sweep(config: Config) -> Config:
    """`config` for the trial that this process belongs to: its files are in its folder, and it
    resumes from there. Unchanged where there is none.

    Raises:
        SystemExit: with status 2, after a message: the script does not read `key=value`, so that
            all trials would be the same; or it makes a second Trainer, which would continue from
            the checkpoints of the first.
    """
    global _configured
    trial = current_sweep_trial()
    if trial is None:
        return config
    if _configured:
        refuse(
            "the script makes a second Trainer, and a trial has one: the two would share a folder, "
            "checkpoints and the value of the trial. Call fit of the first one again instead."
        )
    read = [key for key, origin in config._origins.items() if origin == "command line"]
    for key in trial.keys:
        if not any(each == key or each.startswith(f"{key}.") for each in read):
            refuse(no_effect(key))
    _configured = True
    return config.with_changes(
        run=replace(config.run, dir=trial.folder),
        checkpoint=replace(config.checkpoint, dir=None, resume="auto"),
    )
