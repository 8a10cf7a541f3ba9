"""Train a case of the zoo with Keras or with ktrainer, and keep what can be compared."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from ktrainer import Trainer
from ktrainer.steps import optimizers_of
from ktrainer.steps.variable_placement import placement_of
from ktrainer.verify import first_update_check
from tests.contracts.zoo import ZOO, Case
from tests.dist.harness import keras_state

SEED, EPOCHS = 7, 2
# The last batches have one row: with several ranks, some have nothing to do there.
BATCH, ROWS, VALIDATION_ROWS = 16, 33, 17
ELSEWHERE = np.zeros(0)
# What `health.verify` says.
NOT_AS_ONE_PROCESS = (
    "does not train as in one process",
    "does not compute as in one process",
    "will not be as in one process",
)
QUIET = {
    "logging": {"progress": "none", "csv": False},
    "checkpoint": {"resume": "never"},
    "data": {"batch_size": BATCH, "shuffle": False},
}


@dataclass
class Outcome:
    """What a training left behind.

    Attributes:
        history: Keras' History, by key.
        epochs: its epochs.
        weights: weights, statistics and seed generators of the model; `ELSEWHERE` for those that
            another stage of a pipeline holds.
        slots: variables of its optimizers.
        metrics: states of its metrics.
    """

    history: dict[str, list[float]]
    epochs: list[int]
    weights: list[tuple[str, np.ndarray]] = field(default_factory=list)
    slots: list[tuple[str, np.ndarray]] = field(default_factory=list)
    metrics: list[np.ndarray] = field(default_factory=list)


def outcome_of(model: keras.Model, history: keras.callbacks.History) -> Outcome:
    placement = placement_of(model)

    def value(variable: Any) -> np.ndarray:
        if placement is not None and not placement.holds(variable):
            return ELSEWHERE
        return np.array(variable.numpy())

    def values(variables: Iterable[Any]) -> list[tuple[str, np.ndarray]]:
        return [(v.path, value(v)) for v in variables]

    # Keras gives a GAN an optimizer that it does not use.
    used = [optimizer for optimizer in optimizers_of(model) if optimizer.iterations.numpy()]
    return Outcome(
        dict(history.history),
        list(history.epoch),
        values(model.variables),
        values(v for optimizer in used for v in optimizer.variables),
        [np.array(v.numpy()) for metric in model.metrics for v in metric.variables],
    )


def config(**settings: Any) -> dict[str, Any]:
    """A quiet configuration; `settings` are sections, merged into it."""
    merged: dict[str, Any] = {key: dict(value) for key, value in QUIET.items()}
    merged["trainer"] = {"epochs": EPOCHS}
    for key, value in settings.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | dict(value) if both else value
    return merged


def with_keras(case: Case, validate: bool = True, **arguments: Any) -> Outcome:
    """Train with `Model.fit`."""
    keras.utils.set_random_seed(SEED)
    model = case.build()
    x, y, weights = keras.utils.unpack_x_y_sample_weight(case.data(ROWS))
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        class_weight=case.class_weight,
        validation_data=case.data(VALIDATION_ROWS) if validate else None,
        verbose=0,
        **arguments,
    )
    return outcome_of(model, history)


def with_ktrainer(
    case: Case, validate: bool = True, callbacks: Any = (), **settings: Any
) -> Outcome:
    """Train with a Trainer; `settings` as for `config`."""
    with Trainer(config(**settings), callbacks=callbacks) as trainer:
        keras.utils.set_random_seed(SEED)
        history = trainer.fit(
            case.build(),
            case.data(ROWS),
            validation_data=case.data(VALIDATION_ROWS) if validate else None,
            class_weight=case.class_weight,
        )
        return outcome_of(trainer.model, history)


@contextmanager
def unhurried() -> Iterator[None]:
    """However busy the machine is, `health.verify` is not left out for the time that it takes."""
    seconds, first_update_check.SECONDS = first_update_check.SECONDS, 1e3
    try:
        yield
    finally:
        first_update_check.SECONDS = seconds


@unhurried()
def train(names: Iterable[str], times: int = 1, **backend: Any) -> dict[str, list[Outcome]]:
    """Train models of the zoo one after another in float64, each `times` times; `health.verify`
    must find nothing."""
    outcomes: dict[str, list[Outcome]] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", rf"[\s\S]*({'|'.join(NOT_AS_ONE_PROCESS)})")
        for name in names:
            for _ in range(times):
                keras_state.clear()
                use_float64()
                outcomes.setdefault(name, []).append(with_ktrainer(ZOO[name], backend=backend))
    return outcomes


@functools.cache
def local(name: str) -> Outcome:
    """What one process makes of a model of the zoo, in float64."""
    return train([name], name="local")[name][0]


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Bitwise equal, in values, order and names of the logs, weights, slots and metrics."""
    assert list(ours.history) == list(theirs.history)
    assert ours.epochs == theirs.epochs
    for key, values in theirs.history.items():
        np.testing.assert_array_equal(ours.history[key], values, err_msg=key)
    for part in ("weights", "slots"):
        pairs = zip(getattr(ours, part), getattr(theirs, part), strict=True)
        for (_, mine), (name, value) in pairs:
            assert mine.dtype == value.dtype, name
            np.testing.assert_array_equal(mine, value, err_msg=name)
    for mine, value in zip(ours.metrics, theirs.metrics, strict=True):
        np.testing.assert_array_equal(mine, value)


def use_float64() -> None:
    """Compute in float64 from here on: errors stand out from round-off."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def digest(outcome: Outcome) -> str:
    """A hash of the bits of all weights and slots."""
    arrays = [array for _, array in outcome.weights + outcome.slots]
    return hashlib.blake2b(b"".join(a.tobytes() for a in arrays), digest_size=8).hexdigest()


def largest_difference(
    ours: list[tuple[str, np.ndarray]], theirs: list[tuple[str, np.ndarray]]
) -> tuple[float, str]:
    """max|a-b| / max|b| of the variable where that is largest, and its name."""
    worst = (0.0, "")
    for (_, a), (name, b) in zip(ours, theirs, strict=True):
        if not b.size:
            continue
        a, b = np.float64(a), np.float64(b)
        gap, scale = np.abs(a - b).max(), np.abs(b).max()
        worst = max(worst, (float(gap / scale) if gap else 0.0, name))
    return worst
