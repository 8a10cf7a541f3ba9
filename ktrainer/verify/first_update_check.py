"""`health.verify`: before the first update, compare gradients at once with those in parts.

Rank 0 alone computes the loss and gradients of a few of its examples twice, without any
communication: at once, and in as many parts as there are ranks, replicas and microbatches,
combined as those are. The weights are those that the model has by then. Nothing that trains is
touched, and an error in here is no error of the run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np
import tensorflow as tf

from ktrainer.config import Config, PipelineConfig
from ktrainer.data import Feed
from ktrainer.data.local_batch import count_rows, first_rows, take_slice
from ktrainer.distributed import World
from ktrainer.plan.run_plan import Plan
from ktrainer.runtime.garbage_collection import return_freed_memory
from ktrainer.steps.loss_scope import explain_coupled_call
from ktrainer.steps.step_helpers import has_own_steps
from ktrainer.steps.strategy_scope import outside_strategy_scope
from ktrainer.steps.variable_placement import placement_of
from ktrainer.verify.batch_invariant_random import RandomDraws
from ktrainer.verify.eager_pass import GradientPass, GradientPasses, eager_passes, summed_tables
from ktrainer.verify.gradient_compare import (
    call_couples_examples,
    difference,
    explain,
    explain_lookup,
    repeated_lookups,
    rounding_only,
)
from ktrainer.verify.metric_compare import coupled_metric, recorded_updates
from ktrainer.verify.side_effects import CheckSkipped, no_communication
from ktrainer.verify.update_split import Split, split_of

SECONDS = 5.0  # after which the check ends
_PARTS, _ROWS_A_PART = 4, 3
_MOST_BYTES = 512 * 2**20  # of weights: their gradients are held three to five times
_MOST_ROW_BYTES = 16 * 2**20
_FULL_CHECK = "`ktrainer verify SCRIPT` runs the full check."

# What each model was compiled with when it was checked, and what was found besides.
_checked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass(frozen=True)
class UpdateFacts:
    """Findings of the check, by paths of variables.

    Attributes:
        rounding_only: those whose gradients are no more than rounding errors, which their
            optimizers scale up.
        assigned: those that layers assign, besides batch normalization and seeds.
    """

    rounding_only: Sequence[str] = ()
    assigned: Sequence[str] = ()


def check_first_update(
    model: keras.Model, feeds: Sequence[Feed], config: Config, plan: Plan, world: World
) -> UpdateFacts:
    """Warn if the loss of `model` is another one in parts than at once; all ranks call it.

    Call it where this process has all of the model: under a pipeline before it is cut.

    Args:
        feeds: all that are open; the first one's examples are used.

    Returns:
        What was found besides, on rank 0; as it was found if the model was checked before.
    """
    split = split_of(config, plan)
    # Then the call runs in microbatches, and the loss is that of a replica's whole batch.
    own = isinstance(config.backend, PipelineConfig) and has_own_steps(model)
    if config.health.verify == "off" or split.parts == 1:
        return UpdateFacts()
    exact = own or config.trainer.loss_scope == "global"  # whatever the loss is
    if (known := _known(model, (split, exact))) is not None:
        return known
    batch, failed = _first_rows(feeds[0], _ROWS_A_PART * _PARTS)
    if not world.is_root:
        return UpdateFacts()
    try:
        if failed is not None:
            raise CheckSkipped(failed)
        # In a strategy's scope, copies would be variables of the strategy.
        with _paused(feeds), outside_strategy_scope(), no_communication(world):
            problem, facts = _check(model, batch, feeds[0], plan, split, exact)
            if own and problem is None and split.replicas > 1:
                split_loss = replace(split, microbatches=1)
                problem, more = _check(model, batch, feeds[0], plan, split_loss, False)
                facts = replace(more, assigned=facts.assigned)
    except Exception as error:
        _say_skipped(error, config)
        return UpdateFacts()
    finally:
        return_freed_memory()
    _remember(model, (split, exact), facts)
    if problem is not None:
        warnings.warn(problem, stacklevel=2)
    return facts


@contextmanager
def _paused(feeds: Sequence[Feed]) -> Iterator[None]:
    """Let data sources wait: random generators are rewound, and functions run eagerly, for the
    whole process.

    Raises:
        CheckSkipped: one cannot wait.
    """
    with ExitStack() as stack:
        for feed in feeds:
            if problem := stack.enter_context(feed.paused(SECONDS)):
                raise CheckSkipped(problem)
        yield


def _known(model: keras.Model, how: tuple[Split, bool]) -> UpdateFacts | None:
    """Findings if the model was checked as it is compiled now, else None; from now on it
    counts as checked."""
    if (before := _checked.get(model)) is not None:
        checked, compiled, facts = before
        now = zip(compiled, _compiled(model), strict=True)
        if checked == how and all(old() is new for old, new in now):
            return cast(UpdateFacts, facts)
    _remember(model, how, UpdateFacts())
    return None


def _remember(model: keras.Model, how: tuple[Split, bool], facts: UpdateFacts) -> None:
    # Weakly, as they may know the model, which would then never go.
    _checked[model] = how, [_reference(each) for each in _compiled(model)], facts


def _compiled(model: keras.Model) -> list[Any]:
    return [getattr(model, name, None) for name in ("_compile_loss", "optimizer")]


def _reference(thing: Any) -> Callable[[], Any]:
    return (lambda: None) if thing is None else ref(thing)


def _first_rows(feed: Feed, rows: int) -> tuple[Any, str | None]:
    """A few examples of this rank's, or why there are none."""
    try:
        batch = feed.peek(rows)
    except Exception as error:
        return None, f"its data cannot be looked at before training ({first_line(error)})"
    return (batch, None) if batch is not None else (None, "there is no batch")


def _check(
    model: keras.Model, batch: Any, feed: Feed, plan: Plan, into: Split, exact: bool
) -> tuple[str | None, UpdateFacts]:
    """A loss that will not train as in one process, and what else was found. Of an `exact` loss
    only the model's call is checked."""
    _refuse(model, plan)
    batch, rows = _few_rows(batch)
    parts = min(into.parts, _PARTS, rows)
    if parts < 2:
        raise CheckSkipped("a batch has fewer than two examples")
    draws = RandomDraws()
    with eager_passes(draws):
        passes = GradientPasses(model, feed.uniform, draws, SECONDS)
        facts = UpdateFacts(assigned=passes.assigned(batch) if into.in_turn > 1 else ())
        if exact:
            coupled = call_couples_examples(passes, batch, rows, parts)
            return (f"{explain_coupled_call(str(into))} {_FULL_CHECK}" if coupled else None), facts
        with recorded_updates(model) as updates:
            whole = passes.whole(batch)
        split = _in_parts(passes, batch, rows, parts)
        found = difference(whole, split, model, parts, rows)
        if found is None:
            lookups = repeated_lookups(whole, split)
            metric = coupled_metric(model, updates, rows, parts)
        else:
            _refuse_what_does_not_repeat(passes, whole, batch, model, parts, rows)
            if not _differs_in_fewer_rows(passes, batch, model, parts, rows):
                return None, facts
            if found.factor is None and call_couples_examples(passes, batch, rows, parts):
                return f"{explain_coupled_call(str(into))} {_FULL_CHECK}", facts
    if found is not None:
        return explain(found, str(into), _FULL_CHECK), facts
    facts = replace(facts, rounding_only=rounding_only(whole, split, model))
    if (path := _concatenated(model, feed.spec, lookups, into)) is not None:
        return explain_lookup(path, str(into)), facts
    return (metric.explain(str(into)) if metric else None), facts


def _refuse_what_does_not_repeat(
    passes: GradientPasses,
    whole: GradientPass,
    batch: Any,
    model: keras.Model,
    parts: int,
    rows: int,
) -> None:
    try:
        same = difference(whole, passes.whole(batch), model, parts, rows) is None
    except CheckSkipped:
        same = False
    if not same:
        raise CheckSkipped(
            "two passes over the same examples differ: it draws random numbers outside of "
            "Keras and tf.random, or changes a state in Python"
        )


def _differs_in_fewer_rows(
    passes: GradientPasses, batch: Any, model: keras.Model, parts: int, rows: int
) -> bool:
    """Whether there is a difference for another number of rows, too. Eagerly, a loss with as many
    elements as there are rows counts as one of examples, whatever it is."""
    fewer = rows - parts
    if fewer < parts:
        return True
    head = first_rows(batch, fewer)
    whole, split = passes.whole(head), _in_parts(passes, head, fewer, parts)
    return difference(whole, split, model, parts, fewer) is not None


def _concatenated(model: keras.Model, spec: Any, lookups: Sequence[str], into: Split) -> str | None:
    """The first of these variables of which the slices of parts are put one after another."""
    if not lookups:
        return None
    unknown = model.run_eagerly or into.microbatches > 1  # a pipeline always concatenates
    summed = set() if unknown else summed_tables(model, spec)
    return next((path for path in lookups if path not in summed), None)


def _in_parts(passes: GradientPasses, batch: Any, rows: int, parts: int) -> Any:
    slices = [take_slice(batch, rows, part, parts) for part in range(parts)]
    return passes.split(slices, [count_rows(each) / rows for each in slices])


def _refuse(model: keras.Model, plan: Plan) -> None:
    if placement_of(model) is not None or any(v._value is None for v in model.variables):
        raise CheckSkipped("no process has all of it")
    if plan.strategy is not None and plan.strategy.strategy == "parameter_server":
        raise CheckSkipped("its weights are on parameter servers")
    if not model.trainable_variables:
        raise CheckSkipped("it has no weights yet")
    layers = model._flatten_layers()
    if any(isinstance(each, keras.Sequential) and not each.built for each in layers):
        raise CheckSkipped("it is not built yet, and would be, for the few examples of the check")
    size = sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in model.trainable_variables)
    if size > _MOST_BYTES:
        raise CheckSkipped(f"it has {size / 2**20:.0f} MiB of weights")


def _few_rows(batch: Any) -> tuple[Any, int]:
    """The first examples of a batch as tensors, and how many."""
    batch = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    counts = {int(leaf.shape[0]) for leaf in leaves}
    if len(counts) != 1:
        raise CheckSkipped("the first axis of its data is not the examples")
    (given,) = counts
    rows = min(given, _PARTS * _ROWS_A_PART)
    size = sum(_bytes(leaf) for leaf in leaves) / given
    if size > _MOST_ROW_BYTES:
        raise CheckSkipped(f"an example has {size / 2**20:.0f} MiB")
    return (batch if rows == given else first_rows(batch, rows)), rows


def _bytes(leaf: Any) -> float:
    flat = tf.nest.flatten(leaf, expand_composites=True)
    return sum(float(np.prod(t.shape)) * t.dtype.size for t in flat)


def _say_skipped(error: Exception, config: Config) -> None:
    if config.logging.progress == "none":
        return
    why = str(error) if isinstance(error, CheckSkipped) else first_line(error)
    print(
        f"ktrainer: health.verify did not check the model: {why}. {_FULL_CHECK}",
        file=sys.stderr,
        flush=True,
    )


def first_line(error: Exception) -> str:
    """Text of an error for a display."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
