"""Match the weights of a Keras 3 model with the variables in a Keras 2 checkpoint.

Both are walked together, by the names that Keras 2 tracked: attributes, items of lists and dicts,
and `layer_with_weights-N` of functional and sequential models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import keras

from ktrainer.checkpoint.tf_checkpoint.object_graph import FileVariable, ObjectGraph

Matches = dict[int, FileVariable]  # by the id of the Keras variable

_NUMBERED = re.compile(r"layer_with_weights-(\d+)")
_OWNERS = (keras.layers.Layer, keras.metrics.Metric)
_RENAMED = {"kernel": "depthwise_kernel"}  # of DepthwiseConv, since Keras 3


def match_weights(model: Any, graph: ObjectGraph) -> tuple[Matches, int]:
    """The file's variables of the model's weights and metrics, and the object that is the model.

    That object is the root or one of its children: the one of which most weights match. Shapes and
    dtypes are not compared.
    """
    root = graph.children[0]
    first = [root["model"]] if "model" in root else []
    optimizers = set(graph.optimizers())
    nodes = [n for n in dict.fromkeys([*first, 0, *root.values()]) if n not in optimizers]
    found = [(_matched(model, node, graph), node) for node in nodes]
    fitting = {id(v): tuple(v.shape) for v in model.weights}
    return max(found, key=lambda each: sum(fitting.get(k) == f.shape for k, f in each[0].items()))


def _matched(model: Any, node: int, graph: ObjectGraph) -> Matches:
    matches: Matches = {}
    _walk(model, node, graph, matches, set())
    return matches


def _walk(
    layer: Any, node: int, graph: ObjectGraph, matches: Matches, seen: set[tuple[int, int]]
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
            matches.setdefault(id(value), variable)
    if isinstance(layer, keras.Model):
        rest = [each for each in layer.layers if each.weights and id(each) not in inner]
        for each, place in _numbered(rest, node, graph, {p for _, p in inner.values()}):
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
    layers: list[Any], node: int, graph: ObjectGraph, taken: set[int]
) -> list[tuple[Any, int]]:
    """(layer, its object), by `layer_with_weights-N`: by a name that is in both, else in order."""
    numbers = {int(m[1]): n for w, n in graph.children[node].items() if (m := _NUMBERED.match(w))}
    places = [numbers[k] for k in sorted(numbers) if numbers[k] not in taken]
    named = {_layer_name(place, graph): place for place in places}
    pairs = []
    for layer in list(layers):
        if not _is_automatic(layer) and layer.name in named:
            pairs.append((layer, named[layer.name]))
            layers.remove(layer)
            places.remove(named[layer.name])
    if len(layers) == len(places):
        return pairs + list(zip(layers, places, strict=True))
    # Something is missing, so nothing will be imported; aligned for the table of what.
    here = [str(sorted(tuple(v.shape) for v in layer.weights)) for layer in layers]
    there = [str(sorted(v.shape for v in graph.below(place))) for place in places]
    for a, b, size in SequenceMatcher(None, here, there, False).get_matching_blocks():
        pairs += zip(layers[a : a + size], places[b : b + size], strict=True)
    return pairs


def _layer_name(place: int, graph: ObjectGraph) -> str | None:
    """The name of a layer in the file, after those of its variables; None for nested layers."""
    names = [v.full_name for n in graph.children[place].values() if (v := graph.variable(n))]
    return names[0].rsplit("/", 2)[-2] if names and "/" in names[0] else None


def _is_automatic(layer: Any) -> bool:
    """Whether Keras may have named the layer: after its class, with a number."""
    word = re.sub(r"\W|_", "", type(layer).__name__).lower()
    return re.sub(r"_\d+$", "", layer.name).replace("_", "") == word
