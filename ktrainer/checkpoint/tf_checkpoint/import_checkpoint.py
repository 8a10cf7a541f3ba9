"""Import a `tf.train.Checkpoint` of Keras 2: all of it, or nothing and a table of what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ktrainer.checkpoint.contents.capture_state import named_variables
from ktrainer.checkpoint.contents.run_snapshot import model_text, take_snapshot
from ktrainer.checkpoint.export.export_model import model_of_function
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.checkpoint.tf_checkpoint.match_optimizer import (
    OptimizerMatch,
    build_optimizer,
    pair_optimizers,
)
from ktrainer.checkpoint.tf_checkpoint.match_weights import Matches, attributes, match_weights
from ktrainer.checkpoint.tf_checkpoint.object_graph import FileVariable, ObjectGraph, find_prefix
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from ktrainer.state.progress import Progress
from ktrainer.steps.named_variables import built_optimizers

_UNCLEAR = "by its name in another order"
_NAME_THEM = (
    "\nWhich of these layers, of one shape, is which is not clear: they are in the order of the "
    "file, but their names are not. Give each its name in the file, as in "
    "Dense(3, name='dense_1')."
)
_ROW = tuple[str, str, str, str]  # name and facts in the model, facts and name in the file


@dataclass
class _Plan:
    """Assignments to make, and the reasons against others."""

    pairs: list[tuple[Any, FileVariable]] = field(default_factory=list)
    rows: list[_ROW] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: int = 0


def import_checkpoint(
    file: Path, function: str, output: Path | None = None, *, weights_only: bool = False
) -> tuple[Path, list[str]]:
    """Write a checkpoint of this package with the state in a `tf.train.Checkpoint` file.

    Args:
        file: prefix of the file, or its folder.
        function: `MODULE:FUNCTION` that builds, and compiles, the Keras 3 model.
        output: the folder to put it in; None: `FILE-ktrainer`.
        weights_only: leave the optimizers on both sides alone.

    Returns:
        The folder of the checkpoint, and what the user should know, in words.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged, or does not fit the model; nothing
            was written.
    """
    prefix = find_prefix(file)
    graph = ObjectGraph(prefix)
    keras.utils.set_random_seed(0)  # the same file gives the same state of random generators
    model = model_of_function(function)
    plan = _plan(model, graph, weights_only)
    if plan.rows:
        raise CheckpointError(
            f"{prefix} does not fit the model of {function}, and nothing was written:\n"
            + table(plan.rows)
            + (_NAME_THEM if any(_UNCLEAR in row for row in plan.rows) else "")
        )
    if plan.step < 0:
        raise CheckpointError(f"{prefix} is damaged: its optimizer has made {plan.step} updates")
    store = Store(output or prefix.with_name(f"{prefix.name}-ktrainer"))
    path = store.path_of(plan.step)
    if path.exists():
        raise CheckpointError(f"{path} exists already: remove it, or give another folder as --out")
    for variable, value in [(variable, graph.read(found)) for variable, found in plan.pairs]:
        variable.assign(value)
    for optimizer in built_optimizers(model):
        optimizer._iterations.assign(optimizer._iterations * _parts_of_updates(optimizer))
    snapshot = take_snapshot(model, Progress(step=plan.step), SingleWorld(), ())
    facts = {**snapshot.facts, "imported": str(prefix)}
    store.save(snapshot.arrays, snapshot.state, plan.step, facts=facts, texts=model_text(model))
    return path, plan.notes


def _plan(model: Any, graph: ObjectGraph, weights_only: bool) -> _Plan:
    plan = _Plan()
    found = match_weights(model, graph)
    weights, node = found.variables, found.node
    plan.rows += [(here, _UNCLEAR, there, "") for here, there in found.unclear]
    if found.in_order:
        names = ", ".join(found.in_order)
        plan.notes.append(
            f"models of one shape, whose names the file does not have, are taken in order: {names}"
        )
    _add(plan, [(f"model/{v.path}", v) for v in model.weights], weights)
    # Of metrics, which start new in each epoch, and weights.
    _add_rest(plan, graph, {found.key for found in weights.values()})
    plan.notes += _other_notes(model, graph)
    if any(v.name == "seed_generator_state" for v in model.variables):
        plan.notes.append("random generators of layers start new: the file has none for Keras 3")
    if weights_only:
        plan.notes.append("weights only: the optimizer starts new, at step 0")
    elif graph.optimizers():
        _plan_optimizers(plan, model, graph, weights, node)
    elif built_optimizers(model):
        plan.notes.append("no optimizer in the file: the model's starts new, at step 0")
    return plan


def _other_notes(model: Any, graph: ObjectGraph) -> list[str]:
    notes = []
    if tables := graph.tables():
        notes.append(f"tables are left out, the model's own are used: {', '.join(tables)}")
    layers = {type(each).__name__ for each in model._flatten_layers()}
    for name in sorted(layers & {"ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"}):
        notes.append(
            f"{name}: the default of recurrent_activation was Keras 2's hard_sigmoid, "
            "clip(0.2 x + 0.5, 0, 1); in Keras 3 it is sigmoid. Give the layer that function if "
            "its weights were trained with it"
        )
    return notes


def _plan_optimizers(
    plan: _Plan, model: Any, graph: ObjectGraph, weights: Matches, node: int
) -> None:
    present = {id(optimizer): optimizer for optimizer in built_optimizers(model)}
    # Keras and TensorFlow have lists of attributes of their own, whose paths are longer.
    paths = sorted(attributes(model), key=lambda each: each[0].count("/"), reverse=True)
    named = {id(o): name for name, o in paths if id(o) in present}
    pairs = pair_optimizers([(named.get(k, ""), o) for k, o in present.items()], node, graph)
    for optimizer, place in pairs:
        build_optimizer(optimizer, model, place, graph, weights)
    places = {id(optimizer): place for optimizer, place in pairs}
    names = {id(variable): name for name, variable in named_variables(model)}
    slots_follow = not plan.rows
    for key, optimizer in present.items():
        kind = type(optimizer).__name__
        if key not in places:
            plan.rows.append((named.get(key) or kind, kind, "", ""))
            continue
        match = OptimizerMatch(optimizer, places[key], graph, weights)
        if match.problem:
            plan.rows.append((kind, "optimizer", match.problem, _name_of(places[key], graph)))
        elif slots_follow:
            _add_optimizer(plan, optimizer, places[key], match, names)
    left = [place for place in graph.optimizers() if place not in places.values()]
    plan.rows += [("", "", "optimizer", _name_of(place, graph)) for place in left]
    first = next(iter(present.values()), None)
    made = (graph.read(found) for v, found in plan.pairs if first and v is first._iterations)
    plan.step = next((int(count) * _parts_of_updates(first) for count in made), 0)


def _parts_of_updates(optimizer: Any) -> int:
    """How many gradients an update adds up, each of which Keras 3 counts. Keras 2 counts
    updates."""
    return optimizer.gradient_accumulation_steps or 1


def _add_optimizer(
    plan: _Plan, optimizer: Any, place: int, match: OptimizerMatch, names: dict[int, str]
) -> None:
    """Add the variables of an optimizer of the same kind."""
    fresh = match.fresh - set(match.matches)
    variables = [(names[id(v)], v) for v in optimizer.variables if id(v) not in fresh]
    used = match.used | _add(plan, variables, match.matches)
    plan.notes += [f"{type(optimizer).__name__}: {note}" for note in match.notes]
    slots = (match.graph.variable(slot) for slot in match.graph.slots[place].values())
    found = {v.key: v for v in [*match.graph.below(place), *slots] if v is not None}
    plan.rows += [("", "", _facts(v), _path(v)) for key, v in found.items() if key not in used]


def _path(variable: FileVariable) -> str:
    """The path in the file; its name too, where the path is a number in a list of slots."""
    named = f" ({variable.full_name})" if "/_variables/" in variable.path else ""
    return variable.path + named


def _name_of(node: int, graph: ObjectGraph) -> str:
    names = (w for children in graph.children for w, n in children.items() if n == node)
    return next(names, str(node))


def _add(plan: _Plan, named: Iterable[tuple[str, Any]], matches: Matches) -> set[str]:
    """Add (name, variable) pairs to the plan, as pairs or as rows; return the keys used."""
    used: set[str] = set()
    for name, variable in named:
        found = matches.get(id(variable))
        if found is None:
            plan.rows.append((name, _facts(variable), "", ""))
            continue
        if found.key in used:
            plan.rows.append((name, _facts(variable), "shared with one above", _path(found)))
            continue
        used.add(found.key)
        if _is_like(variable, found, name.startswith("optimizer/")):
            plan.pairs.append((variable, found))
        else:
            plan.rows.append((name, _facts(variable), _facts(found), _path(found)))
    return used


def _is_like(variable: Any, found: FileVariable, casts: bool) -> bool:
    """Whether `variable` can have the value; `casts`: in another precision, if it is a scalar."""
    if tuple(variable.shape) != found.shape:
        return False
    here = str(variable.dtype)
    # Counters are int64 in Keras 2, int32 in Keras 3; learning rates are float32 in Keras 2.
    same_kind = here.rstrip("0123456789") == found.dtype.rstrip("0123456789")
    return here == found.dtype or (casts and same_kind and not found.shape)


def _add_rest(plan: _Plan, graph: ObjectGraph, used: set[str]) -> None:
    """Note what the file has beside model and optimizers: a script's counters, or weights."""
    top = set(graph.children[0].values())
    for variable in graph.below(0, without=graph.optimizers()):
        if variable.key in used:
            continue
        if variable.node in top and not variable.shape:
            value = graph.read(variable)
            plan.notes.append(f"{variable.path} = {_text(value)} is left out")
        else:
            plan.rows.append(("", "", _facts(variable), variable.path))


def _text(value: np.ndarray) -> str:
    return str(value.item())[:80]


def _facts(variable: Any) -> str:
    return f"{variable.dtype}{list(variable.shape)}"


def table(rows: Iterable[_ROW]) -> str:
    """Mismatches, a line each, in columns."""
    lines: list[_ROW] = [("in the model", "", "in the file", ""), *rows]
    lines = [tuple(cell or "-" for cell in row) if k else row for k, row in enumerate(lines)]  # type: ignore[misc]
    widths = [max(len(row[k]) for row in lines) for k in range(4)]
    return "\n".join(
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
