"""Cache of a model's compiled programs, valid until `compile` is called again.

As in Keras, what was compiled stays until `compile` is called again: several models in turn, or
`fit` in a loop, compile each step once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

from ktrainer.errors import ModelError
from ktrainer.steps.program_interface import Program
from ktrainer.steps.step_options import StepOptions

_ATTRIBUTE = "_ktrainer_programs"
_KEPT = 2  # of one model, with different options


@dataclass(eq=False)
class _ProgramCache:
    """Programs of one model, the last one used last; no container, which Keras would track."""

    known: list[tuple[list[Any], StepOptions, Program]] = field(default_factory=list)


def cached_program(
    model: keras.Model,
    options: StepOptions,
    owner: list[Any],
    prepare: Callable[[keras.Model, StepOptions], Program],
    any_options: bool = False,
) -> Program:
    """The program of `model`: one that is known, or a new one.

    Args:
        options: how its steps run.
        owner: what it is compiled for besides: backend and ranks.
        prepare: makes a new one.
        any_options: take the one used last, whatever its options: only the model's own steps are
            to be run, not an update.
    """
    # With the model, past Keras' tracking: they live as long as it does.
    programs = vars(model).setdefault(_ATTRIBUTE, _ProgramCache())
    state = [*owner, *compile_state(model)]
    known = [entry for entry in programs.known if _same(entry[0], state)]
    fitting = [e for e in known if any_options or e[1] == options]
    if fitting:
        entry = fitting[-1]
        entry[2].check_unchanged()
        known.remove(entry)
    else:
        entry = (state, options, prepare(model, options))
    programs.known = [*known, entry][-_KEPT:]
    return entry[2]


def forget_programs(model: keras.Model) -> None:
    """Let the next call make a new program: the variables of `model` are placed otherwise."""
    vars(model).pop(_ATTRIBUTE, None)


def warn_of_frozen_layers(program: Program) -> None:
    """Warn where layers were frozen or unfrozen since the first `fit`, without `compile`.

    As in Keras, steps that are compiled keep what they train. A run that is restarted has none, so
    it would train other weights.
    """
    model = program.model
    trained = {id(v) for v in model.trainable_variables}
    now = {id(v): id(v) in trained for v in model.weights}
    before = program.trainable = program.trainable or now
    changed = [v for v in model.weights if before.get(id(v), now[id(v)]) != now[id(v)]]
    if changed and not model.run_eagerly:
        names = dict.fromkeys(v.path.rpartition("/")[0] for v in changed)
        warnings.warn(
            f"{', '.join(names)} of the model {model.name!r} changed `trainable` since its first "
            "fit, and it was not compiled again. As in Keras, this fit trains the weights that "
            "the first has trained; but a restart inside of it would not. Call model.compile "
            "after freezing or unfreezing layers",
            stacklevel=4,
        )


def check_not_compiled_again(model: keras.Model, before: list[Any]) -> None:
    """Refuse a model that a callback has compiled during `fit`.

    Args:
        before: its `compile_state` as `fit` began.

    Raises:
        ModelError: its compiled step is the former one, and a run that resumes would have another.
    """
    if not _same(before, compile_state(model)):
        raise ModelError(
            "a callback has called model.compile, or given the optimizer another schedule, during "
            "fit, whose compiled step has no part in it. End this fit (set "
            "self.model.stop_training = True), then call model.compile and fit again, with "
            "initial_epoch"
        )


def compile_state(model: keras.Model) -> list[Any]:
    """Objects that are others once the model was compiled again, or has another schedule."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    names = ("_compile_config", "_compile_loss", "_compile_metrics")
    return [
        *(getattr(model, name, None) for name in names),
        optimizer,
        getattr(inner, "_learning_rate", None),
    ]


def _same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(one, two, strict=True)
    )
