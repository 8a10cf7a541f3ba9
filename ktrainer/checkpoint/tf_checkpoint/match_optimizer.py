"""Match the variables of a Keras 3 optimizer with those of a Keras 2 one in a checkpoint.

Both kinds of Keras 2: up to 2.10 and `optimizers.legacy` (`iter`, and slots that refer to their
variables), and from 2.11 on (`_iterations`, and lists whose variables are named after them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras

from ktrainer.checkpoint.tf_checkpoint.match_weights import Matches
from ktrainer.checkpoint.tf_checkpoint.object_graph import FileVariable, ObjectGraph

# Class: attribute of the Keras 3 optimizer: (slot of `optimizers.legacy`, word in the names of
# Keras 2.11 and later). Attributes are without their `_`: one that Keras renames is a mismatch. One
# name means different numbers in different classes.
_ADAM = {"momentums": ("m", "m"), "velocities": ("v", "v"), "velocity_hats": ("vhat", "vhat")}
_SLOTS: dict[str, dict[str, tuple[str, str]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Nadam": _ADAM,
    "Adamax": {"m": ("m", "m"), "u": ("v", "u")},
    "SGD": {"momentums": ("momentum", "m")},
    "RMSprop": {
        "velocities": ("rms", "velocity"),
        "momentums": ("momentum", "momentum"),
        "average_gradients": ("mg", "average_gradient"),
    },
    "Adagrad": {"accumulators": ("accumulator", "accumulator")},
    "Adadelta": {
        "accumulated_grads": ("accum_grad", "accumulated_grad"),
        "accumulated_delta_vars": ("accum_var", "accumulated_delta_var"),
    },
    "Ftrl": {"accumulators": ("accumulator", "accumulator"), "linears": ("linear", "linear")},
    "Lion": {"momentums": ("", "m")},
}
_AVERAGES = {"model_variables_moving_average": ("", "average")}
_SAME = {"AdamW": "Adam"}  # the state is the same
_NUMBER = re.compile("u?int|float|bfloat")
_FRESH = "accumulated_gradients"  # Keras 2 has none
_NADAM = (
    "Keras 2 multiplied u_product once for each weight in compiled functions, Keras 3 does so once "
    "for each update: the next updates differ a little"
)
_SETTINGS = (
    "beta_1",
    "beta_2",
    "rho",
    "momentum",
    "epsilon",
    "beta",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "learning_rate_power",
)


class OptimizerMatch:
    """Which variable in the file is which of a Keras 3 optimizer's.

    Attributes:
        matches: the file's variables, by the id of the optimizer's.
        fresh: ids of the optimizer's variables that rightly keep their initial values.
        used: keys in the file that need no place, such as hyperparameters.
        notes: what the user should know, in words.
        problem: the reason why the two optimizers are of different kinds; None if they are not.

    Args:
        optimizer: built.
        node: the optimizer in the file.
        weights: the matches of the model's weights.
    """

    def __init__(self, optimizer: Any, node: int, graph: ObjectGraph, weights: Matches) -> None:
        self.graph, self.node, self.weights = graph, node, weights
        self.matches: Matches = {}
        self.fresh: set[int] = set()
        self.used: set[str] = set()
        self.notes: list[str] = []
        kind = _kind(optimizer)
        self._several: set[str] = set()  # names of more than one weight
        self.problem = _other_kind(kind, node, graph)
        self._match_counters(optimizer)
        if self.problem is None:
            self._match_slots(optimizer, {**_SLOTS[kind], **_AVERAGES})
            if kind == "SGD" and not optimizer.momentum:
                self._leave_out_momentums()
            if kind == "Nadam":
                self.notes.append(_NADAM)
        self._compare_settings(optimizer)
        if self._several:
            self.notes.append(
                f"several weights are named {', '.join(sorted(self._several))}: their slots are "
                "taken in the order of the weights of the Keras 2 model"
            )

    def _child(self, *names: str) -> FileVariable | None:
        """The number that the optimizer has as one of these attributes."""
        children = self.graph.children[self.node]
        words = (word for name in names for word in (name, f"_{name}"))
        found = (self.graph.variable(children.get(word)) for word in words)
        return next((v for v in found if v and not v.shape and _NUMBER.match(v.dtype)), None)

    def _match_counters(self, optimizer: Any) -> None:
        count = self._child("iter", "iterations")
        if count is not None:
            self.matches[id(optimizer._iterations)] = count
            if int(self.graph.read(count)) == 0:  # slots are made by the first update
                self.fresh |= {id(v) for v in optimizer.variables}
        if (now := self._child("current_learning_rate")) is not None:  # what a schedule gave last
            self.used.add(now.key)
        rate, here = self._child("learning_rate"), _learning_rate(optimizer)
        if rate is not None and here is not None:
            self.matches[id(here)] = rate
        elif rate is not None:
            self.used.add(rate.key)
            value = float(self.graph.read(rate))
            self.notes.append(f"learning rate {value:g} in the file; the model's schedule is used")
        elif here is not None:
            self.fresh.add(id(here))
            value = float(here.numpy())
            self.notes.append(f"no learning rate in the file (a schedule); the model's: {value:g}")

    def _match_slots(self, optimizer: Any, slots: Mapping[str, tuple[str, str]]) -> None:
        trained = list(getattr(optimizer, "_trainable_variables", []))
        legacy = self.graph.slots[self.node]
        for name, value in [(key.lstrip("_"), value) for key, value in vars(optimizer).items()]:
            if name == _FRESH:
                self.fresh |= {id(v) for v in value or ()}
            elif isinstance(value, keras.Variable) and id(value) not in self.matches:
                found = self._child(name)
                self.matches |= {} if found is None else {id(value): found}
            elif name in slots and isinstance(value, list) and len(value) == len(trained):
                old, new = slots[name]
                if legacy:
                    self._match_legacy(trained, value, old)
                else:
                    self._match_list(trained, value, name, new)

    def _leave_out_momentums(self) -> None:
        """SGD of Keras 2.11 and later keeps the last update as momentum, whatever `momentum` is."""
        below = self.graph.below(self.node)
        left_out = [v for v in below if v.shape and re.search(r"(^|/)m/", v.full_name)]
        if left_out:
            self.used |= {slot.key for slot in left_out}
            self.notes.append("the model's has no momentum: those in the file are left out")

    def _match_legacy(self, trained: list[Any], values: list[Any], slot: str) -> None:
        places = self.graph.slots[self.node]
        for variable, value in zip(trained, values, strict=True):
            weight = self.weights.get(id(variable))
            place = places.get((weight.node, slot)) if weight else None
            found = self.graph.variable(place)
            if found is not None:
                self.matches[id(value)] = found
            elif weight and any(name == slot for _, name in places):
                self.fresh.add(id(value))  # a slot is made at the first gradient
                self.notes.append(f"{weight.path} was never updated: it has no slot {slot!r}")

    def _match_list(self, trained: list[Any], values: list[Any], name: str, word: str) -> None:
        found = (self.graph.at(self.node, each) for each in (name, f"_{name}"))
        place = next((each for each in found if each is not None), None)
        if place is None:
            return
        items = self.graph.children[place]
        ordered = [items[key] for key in sorted(items, key=lambda k: int(k) if k.isdigit() else -1)]
        slots = [v for each in ordered if (v := self.graph.variable(each)) is not None]
        owned = [(f, v) for v in trained if (f := self.weights.get(id(v)))]
        known = {weight.full_name for weight, _ in owned}
        names = [_owner(slot.full_name, word, known) for slot in slots]
        kept = dict(zip(map(id, trained), values, strict=True))
        # In the order in which Keras 2 had the weights, and so its optimizer their slots.
        position = self.graph.positions()
        owned.sort(key=lambda each: position.get(each[0].node, -1))
        in_order = [n for n in names if n is not None] == [weight.full_name for weight, _ in owned]
        for owner in known:
            of_name = [v for weight, v in owned if weight.full_name == owner]
            found_slots = [slot for slot, n in zip(slots, names, strict=True) if n == owner]
            if len(of_name) != len(found_slots) or (len(of_name) > 1 and not in_order):
                continue
            for variable, slot in zip(of_name, found_slots, strict=True):
                self.matches[id(kept[id(variable)])] = slot
            if len(of_name) > 1:
                self._several.add(owner)

    def _compare_settings(self, optimizer: Any) -> None:
        """Note hyperparameters that differ: Keras 3 has them as plain numbers, the model's."""
        for name in _SETTINGS:
            found = self._child(name)
            if found is None:
                continue
            self.used.add(found.key)
            there, here = float(self.graph.read(found)), getattr(optimizer, name, None)
            if isinstance(here, (int, float)) and abs(there - here) > 1e-6 * abs(there):
                self.notes.append(f"{name} is {there:g} in the file; the model's is used: {here:g}")
        decay = self._child("decay")
        if decay is not None:
            self.used.add(decay.key)
            if value := float(self.graph.read(decay)):
                self.notes.append(
                    f"decay is {value:g} in the file, which Keras 3 does not have: "
                    "use keras.optimizers.schedules.InverseTimeDecay"
                )


def build_optimizer(optimizer: Any, model: Any, node: int, graph: ObjectGraph, w: Matches) -> None:
    """Build an optimizer of a model that has several, with the variables of its slots.

    Args:
        w: the matches of the model's weights.
    """
    legacy = {place for place, _ in graph.slots[node]}
    names = [v.full_name for v in graph.below(node)]

    def is_its_own(found: FileVariable) -> bool:
        return found.node in legacy or any(n.endswith(f"/{found.full_name}") for n in names)

    own = [v for v in model.trainable_variables if id(v) in w and is_its_own(w[id(v)])]
    if own and not optimizer.built:
        optimizer.build(own)


def pair_optimizers(
    named: list[tuple[str, Any]], model_node: int, graph: ObjectGraph
) -> list[tuple[Any, int]]:
    """(optimizer, its object in the file): by attribute, or each the only one there is.

    Args:
        named: (attribute, optimizer) of the model.
    """
    nodes = graph.optimizers()
    if len(named) == len(nodes) == 1:
        return [(named[0][1], nodes[0])]
    pairs = []
    for name, optimizer in named:
        words = (name, name.lstrip("_"))
        places = (graph.at(start, word) for word in words for start in (model_node, 0))
        place = next((p for p in places if p in nodes), None)
        if place is not None:
            pairs.append((optimizer, place))
    return pairs


def _kind(optimizer: Any) -> str:
    names = [each.__name__ for each in type(optimizer).__mro__]
    return next((name for name in names if name in _SLOTS), names[0])


def _other_kind(kind: str, node: int, graph: ObjectGraph) -> str | None:
    """`kind`'s opposite in the file, by the names of its variables; None if it may be the same."""
    if kind not in _SLOTS:
        return f"the slots of {kind} are not known"
    places = [v.full_name for v in graph.below(node)]
    places += [v.full_name for p in graph.slots[node].values() if (v := graph.variable(p))]
    words = {name.split("/")[0].removeprefix("Distributed") for name in places}
    for word in sorted(words & set(_SLOTS)):
        if _SAME.get(word, word) != _SAME.get(kind, kind):
            return f"the file's is {word}"
    return None


def _owner(name: str, word: str, known: set[str]) -> str | None:
    """`dense/kernel` of `Adam/m/dense/kernel` and `m/dense/kernel`, where `m` is the word."""
    ends = [name[m.end() :] for m in re.finditer(rf"(?:^|(?<=/)){re.escape(word)}/", name)]
    return next((end for end in ends if end in known), None)


def _learning_rate(optimizer: Any) -> Any:
    return next((v for v in optimizer.variables if v.name == "learning_rate"), None)
