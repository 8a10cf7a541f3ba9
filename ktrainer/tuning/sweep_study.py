"""The study of a sweep, in Optuna.

What a trial tries depends on the seed, its number and the trials before it alone: each trial has a
sampler of its own. So a sweep that was killed continues as if it had not been.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import optuna
import sqlalchemy
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import OptunaError as OptunaError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ktrainer.config.redact import redact_text
from ktrainer.errors import ConfigError, SetupError
from ktrainer.tuning.search_space import Space, grid_size
from ktrainer.tuning.sweep_trial import SweepTrial

PRUNERS: dict[str, type[optuna.pruners.BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "none": optuna.pruners.NopPruner,
}
STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "not finished",
}
_SETTINGS = "settings"
_RUNG = "completed_rung_"  # Optuna's attribute of a trial, with the value by which it got there
_COUNT_AT = "values at "  # of such an attribute: how many were reported then
# Settings that are compared by digests, which say nothing to a reader.
SECRET, FILE = "secret among the words", "content of --config"


class SweepStudy:
    """A study, made or continued.

    Args:
        storage, name: where it is.
        settings: what must be the same to continue it; `mode`, `sampler`, `pruner` and `seed` are
            among them.
        spaces: of the keys.

    Raises:
        ConfigError: it was made with other settings.
        SetupError: the storage does not answer.
    """

    def __init__(
        self, storage: str, name: str, settings: Mapping[str, Any], spaces: Sequence[Space]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.storage, self.name, self.settings, self.spaces = storage, name, settings, spaces
        lower = settings["mode"] == "min"
        self._direction = StudyDirection.MINIMIZE if lower else StudyDirection.MAXIMIZE
        with answering(storage):
            self._study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction=self._direction,
                pruner=PRUNERS[settings["pruner"]](),
                load_if_exists=True,
            )
        self._check_settings()

    def _check_settings(self) -> None:
        # An earlier version knew fewer.
        known = {**self.settings, **self._study.user_attrs.get(_SETTINGS, {})}
        for name, value in self.settings.items():
            if known[name] != value:
                values = f": {_shown(known[name])}, not {_shown(value)}"
                raise ConfigError(
                    f"the sweep there was begun with another {name}"
                    f"{'' if name in (SECRET, FILE) else values}. Its trials could not be compared "
                    "with new ones: repeat the command that began it, or begin another sweep by "
                    "--dir DIR."
                )
        self._study.set_user_attr(_SETTINGS, known)

    def is_as_begun(self, name: str, value: str) -> bool:
        """Whether `value` is what it was when the sweep began."""
        known = self._study.user_attrs.get(name)
        if known is None:
            self._study.set_user_attr(name, value)
        return known in (None, value)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self._study.get_trials(deepcopy=False)

    @property
    def best(self) -> list[FrozenTrial]:
        """All trials: finished ones first, and of each state the best first."""
        sign = 1 if self._direction == StudyDirection.MINIMIZE else -1
        order = list(STATES)

        def rank(trial: FrozenTrial) -> tuple[int, bool, float, int]:
            value = trial.value
            return order.index(trial.state), value is None, sign * (value or 0), trial.number

        return sorted(self.trials, key=rank)

    def next_trial(self, limit: int) -> FrozenTrial | None:
        """The trial that was not finished, or a new one; None when there are `limit`."""
        trials = self.trials
        for trial in trials:
            if not trial.state.is_finished():
                return trial
        if self.settings["sampler"] == "grid":
            limit = min(limit, grid_size(self.spaces))
        if len(trials) >= limit:
            return None
        self._study.add_trial(self._proposed(trials))  # in one transaction, with its parameters
        return self.trials[-1]

    def _proposed(self, trials: Sequence[FrozenTrial]) -> FrozenTrial:
        """A new trial after these."""
        number = len(trials)
        memory = optuna.create_study(
            study_name=self.name,
            direction=self._direction,
            sampler=self._sampler(number),
            pruner=self._study.pruner,
        )
        memory.add_trials(trials)
        memory.ask({space.key: _distribution(space) for space in self.spaces})
        asked = memory.get_trials(deepcopy=False)[-1]
        return create_trial(
            state=TrialState.RUNNING,
            params=asked.params,
            distributions=asked.distributions,
            system_attrs=asked.system_attrs,
        )

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        seed = int(self.settings["seed"])
        if self.settings["sampler"] == "grid":
            grid = {space.key: list(space.grid()) for space in self.spaces}
            return optuna.samplers.GridSampler(grid, seed=seed)
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "big")
        if self.settings["sampler"] == "random":
            return optuna.samplers.RandomSampler(seed=own)
        return optuna.samplers.TPESampler(seed=own)

    def finish(self, number: int, state: str, value: float | None, **facts: Any) -> float | None:
        """Record how a trial has ended: `finished`, `pruned` or `failed`.

        Returns:
            The value that counts, if there is one: of a pruned trial the one reported last.
        """
        trial = self.trials[number]
        for name, fact in facts.items():
            self._study._storage.set_trial_user_attr(trial._trial_id, name, fact)
        states = {name: kind for kind, name in STATES.items()}
        told = value if state == "finished" else None
        return self._study.tell(number, told, states[state]).value

    def forget(self) -> None:
        """Delete the study."""
        optuna.delete_study(study_name=self.name, storage=self.storage)


@contextmanager
def answering(storage: str | None, kind: type[Exception] = Exception) -> Iterator[None]:
    """Explain the errors of a storage; None: a file in the sweep's folder.

    Raises:
        SetupError: it does not answer.
    """
    try:
        yield
    except kind as error:  # of Optuna, SQLAlchemy or a database's driver
        reason = redact_text(str(error).partition("\n")[0])
        where = f"storage {redact_text(storage)}" if storage else "storage in the sweep's folder"
        raise SetupError(
            f"the {where} cannot be used: {type(error).__name__}: {reason}. The same command "
            "continues the sweep once it can."
        ) from error


class TrialReports:
    """The study as a trial's first rank sees it."""

    def __init__(self, trial: SweepTrial) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = cast(Any, _StorageOfTrial(trial))  # in all that is used here
        self._study = optuna.load_study(
            study_name=trial.study, storage=self._storage, pruner=PRUNERS[trial.pruner]()
        )
        self._id = self._study.get_trials(deepcopy=False)[trial.number]._trial_id

    def report(self, count: int, value: float) -> bool:
        """Report the `count`-th value; return whether the trial is to be pruned."""
        self._storage.count = count
        self._storage.set_trial_intermediate_value(self._id, count, value)
        return bool(self._study.pruner.prune(self._study, self._storage.get_trial(self._id)))


class _StorageOfTrial:
    """Optuna's storage without what a killed run of a trial has left: its later values, and the
    rungs of `halving` and `hyperband` that it reached by them.

    Attributes:
        count: values that this run has reported.
    """

    def __init__(self, trial: SweepTrial) -> None:
        self.count = 0
        self._inner, self._number = optuna.storages.get_storage(trial.storage), trial.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._without_later(self._inner.get_trial(trial_id))

    def get_all_trials(self, *args: Any, **named: Any) -> list[FrozenTrial]:
        return [self._without_later(each) for each in self._inner.get_all_trials(*args, **named)]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        if key.startswith(_RUNG):
            self._inner.set_trial_system_attr(trial_id, f"{_COUNT_AT}{key}", self.count)
        self._inner.set_trial_system_attr(trial_id, key, value)

    def _without_later(self, trial: FrozenTrial) -> FrozenTrial:
        if trial.number != self._number:
            return trial
        trial, attrs = copy.copy(trial), trial.system_attrs
        values = trial.intermediate_values
        trial.intermediate_values = {n: value for n, value in values.items() if n <= self.count}
        trial.system_attrs = {
            key: value
            for key, value in attrs.items()
            if not key.startswith(_RUNG) or attrs.get(f"{_COUNT_AT}{key}", math.inf) < self.count
        }
        return trial


def storage_in(folder: Path) -> str:
    """The URL of a database in a file of the sweep's folder."""
    file = str(folder.absolute() / "study.db")
    return sqlalchemy.URL.create("sqlite", database=file).render_as_string()  # quotes ? and %


def _distribution(space: Space) -> BaseDistribution:
    if space.kind == "choice":
        return CategoricalDistribution(space.choices)
    if space.kind == "int":
        return IntDistribution(int(space.low), int(space.high))
    return FloatDistribution(space.low, space.high, log=space.kind == "log")


def _shown(setting: Any) -> str:
    return " ".join(map(str, setting)) if isinstance(setting, (list, tuple)) else str(setting)
