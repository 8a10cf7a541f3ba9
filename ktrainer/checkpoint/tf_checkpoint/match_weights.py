"""Match the weights of a Keras 3 model with the variables in a Keras 2 checkpoint.

Both are walked together, by the names that Keras 2 tracked: attributes, items of lists and dicts,
and `layer_with_weights-N` of functional and sequential models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import keras

from ktrainer.checkpoint.tf_checkpoint.object_graph import NO_WEIGHTS, FileVariable, ObjectGraph

Matches = dict[int, FileVariable]  # by the id of the Keras variable


class WeightMatches(NamedTuple):
    """Which variable in the file is which weight.

    Attributes:
        variables: the file's variables, by the id of the Keras variable.
        node: the object in the file that is the model.
        unclear: (layer, its name in the file) where layers of one shape are in the same order, but
            by their names in another one.
        in_order: layers of one shape whose names the file does not have, paired in order.
    """

    variables: Matches
    node: int
    unclear: list[tuple[str, str]]
    in_order: list[str]


_NUMBERED = re.compile(r"layer_with_weights-(\d+)")
_NAME = re.compile(r"(.*?)(?:_(\d+))?")
_OWNERS = (keras.layers.Layer, keras.metrics.Metric)
_RENAMED = {"kernel": "depthwise_kernel"}  # of DepthwiseConv, since Keras 3


def match_weights(model: Any, graph: ObjectGraph) -> WeightMatches:
    """The file's variables of the model's weights and metrics.

    The object that is the model is the root or one of its children: the one of which most weights
    match. Shapes and dtypes are not compared.
    """
    root = graph.children[0]
    first = [root["model"]] if "model" in root else []
    optimizers = set(graph.optimizers())
    nodes = [n for n in dict.fromkeys([*first, 0, *root.values()]) if n not in optimizers]
    found = [_matched(model, node, graph) for node in nodes]
    shapes = {id(v): tuple(v.shape) for v in model.weights}
    return max(
        found,
        key=lambda each: sum(shapes.get(k) == f.shape for k, f in each.variables.items()),
    )


def _matched(model: Any, node: int, graph: ObjectGraph) -> WeightMatches:
    matches = WeightMatches({}, node, [], [])
    _walk(model, node, graph, matches, set())
    return matches


def _walk(
    layer: Any, node: int, graph: ObjectGraph, matches: WeightMatches, seen: set[tuple[int, int]]
) -> None:
    if (id(layer), node) in seen:
        return
    seen.add((id(layer), node))
    inner: dict[int, tuple[Any, int]] = {}
    for path, value in attributes(layer):
        words = [path, path.lstrip("_")]
        if isinstance(value, keras.Variable):
            words += [value.name, _RENAMED.get(value.name, value.name)]
        place = next((p for w in words if (p := graph.at(node, w)) is not None), None)
        if place is None:
            continue
        if isinstance(value, _OWNERS):
            inner.setdefault(id(value), (value, place))
        elif isinstance(value, keras.Variable) and (variable := graph.variable(place)):
            matches.variables.setdefault(id(value), variable)
    if isinstance(layer, keras.Model):
        rest = [each for each in layer.layers if each.weights and id(each) not in inner]
        taken = {place for _, place in inner.values()}
        for each, place in _numbered(rest, node, graph, taken, matches):
            inner[id(each)] = (each, place)
    for value, place in inner.values():
        _walk(value, place, graph, matches, seen)


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of the layers, metrics, variables and optimizers in an object's attributes, and
    in lists, tuples and dicts there."""
    for name, value in list(vars(thing).items()):
        yield from _items(name, value, 0)


def _items(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*_OWNERS, keras.Variable, keras.optimizers.Optimizer)):
        yield path, value
    elif depth < 4 and isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _items(f"{path}/{number}", item, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for key, item in value.items():
            yield from _items(f"{path}/{key}", item, depth + 1)


def _numbered(
    layers: list[Any], node: int, graph: ObjectGraph, taken: set[int], matches: WeightMatches
) -> list[tuple[Any, int]]:
    """(layer, its object), by `layer_with_weights-N`: by a name that is in both, else in order, as
    Keras 2 itself restores them. For the same code the order is that of Keras 3."""
    numbers = {int(m[1]): n for w, n in graph.children[node].items() if (m := _NUMBERED.match(w))}
    places = [numbers[k] for k in sorted(numbers) if numbers[k] not in taken]
    every = [_layer_name(place, graph) for place in places]
    named = {n: p for n, p in zip(every, places, strict=True) if every.count(n) == 1}
    pairs = []
    for layer in list(layers):
        if not _is_automatic(layer) and layer.name in named:
            pairs.append((layer, named[layer.name]))
            layers.remove(layer)
            places.remove(named[layer.name])
    if len(layers) == len(places):
        ordered = list(zip(layers, places, strict=True))
        _compare_names(ordered, graph, matches)
        return pairs + ordered
    # Something is missing, so nothing will be imported; aligned for the table of what.
    here = [str(sorted(tuple(v.shape) for v in layer.weights)) for layer in layers]
    there = [str(sorted(v.shape for v in graph.below(place))) for place in places]
    for a, b, size in SequenceMatcher(None, here, there, False).get_matching_blocks():
        pairs += zip(layers[a : a + size], places[b : b + size], strict=True)
    return pairs


def _compare_names(
    pairs: list[tuple[Any, int]], graph: ObjectGraph, matches: WeightMatches
) -> None:
    """Compare the names of layers of one class and shape, which their shapes cannot tell apart,
    where these were paired in order."""
    alike: dict[str, list[tuple[Any, str | None]]] = {}
    for layer, place in pairs:
        kind = f"{type(layer).__name__} {sorted(tuple(v.shape) for v in layer.weights)}"
        alike.setdefault(kind, []).append((layer, _layer_name(place, graph)))
    for group in alike.values():
        if len(group) == 1:
            continue
        there = [name for _, name in group if name is not None]
        if len(there) < len(group):
            matches.in_order.extend(layer.name for layer, _ in group)
        elif not _in_one_order([layer.name for layer, _ in group], there):
            matches.unclear.extend((layer.name, name or "") for layer, name in group)


def _in_one_order(here: list[str], there: list[str]) -> bool:
    """Whether names with numbers, such as Keras gives, put layers in the same order here and there.

    The words before the numbers may differ, as between Horovod's SyncBatchNormalization and ours.
    """
    numbered = [[_NAME.fullmatch(name) for name in names] for names in (here, there)]
    words = [{found[1] for found in each if found} for each in numbered]
    numbers = [[int(found[2] or 0) for found in each if found] for each in numbered]
    if any(len(w) > 1 or len(set(n)) < len(n) for w, n in zip(words, numbers, strict=True)):
        return False
    orders = [sorted(range(len(n)), key=n.__getitem__) for n in numbers]
    return orders[0] == orders[1]


def _layer_name(place: int, graph: ObjectGraph) -> str | None:
    """The name of a layer in the file, after that of a variable in it; None if no name says so, as
    for a model, whose name its layers' variables lack."""
    if any(name.startswith("layer-") or _NUMBERED.match(name) for name in graph.children[place]):
        return None
    todo, seen = [(place, 0)], set()
    while todo:
        node, depth = todo.pop(0)
        if (variable := graph.variable(node)) is not None:
            words = variable.full_name.split("/")
            return words[-depth - 1] if 0 < depth < len(words) else None
        seen.add(node)
        inner = [n for w, n in graph.children[node].items() if w.lstrip("_") not in NO_WEIGHTS]
        todo += [(n, depth + 1) for n in inner if n not in seen]
    return None


def _is_automatic(layer: Any) -> bool:
    """Whether Keras may have named the layer: after its class, with a number."""
    word = re.sub(r"\W|_", "", type(layer).__name__).lower()
    return re.sub(r"_\d+$", "", layer.name).replace("_", "") == word
