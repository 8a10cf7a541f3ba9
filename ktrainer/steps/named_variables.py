"""The variables of a model's state, by unique names."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.naming import to_snake_case
from tensorflow.python.eager.context import context
from tensorflow.python.eager.execute import execute
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    UnliftedInitializerVariable,
)
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.variable_assignments import assign_total
from ktrainer.steps.variable_placement import placement_of

ATTRIBUTE = "attribute/"
INTERNAL = "of_ktrainer"  # the name of variables that this package makes for an update
_WITH_STATE = (
    keras.Loss,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.Metric,  # that `model.metrics` does not list
)
_PER_CALL = ("_losses", "states")  # what Keras' layers keep of one
# Made eagerly, and while a function is traced.
_RESOURCE_VARIABLES = (ResourceVariable, UnliftedInitializerVariable)
# Where TensorFlow has an object's attributes, and Keras a model's loss and metrics, a second time.
_ALIASES = (
    "_self_unconditional_checkpoint_dependencies",
    "_self_unconditional_dependency_names",
    *("_compile_loss", "_compile_metrics", "_loss_tracker", "_metrics"),
)
_OF_KERAS = "_variables"  # a list of what an object of Keras has as attributes
_digests: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of lookup tables, which are constant


class StateVariable:
    """A variable of the user's own, Keras' or TensorFlow's, with a name that a checkpoint can hold.

    Args:
        path: its place in the `state` of a loop, or in a model.
        variable: a `keras.Variable` or `tf.Variable`.
        of_generator: whether it is the state of a random generator.
        is_first: whether this process has the first replica; None: it has all.
    """

    trainable = False  # by the models' optimizers

    def __init__(
        self, path: str, variable: Any, of_generator: bool = False, is_first: bool | None = None
    ) -> None:
        self.path = self.name = path
        self.variable, self.of_generator, self._is_first = variable, of_generator, is_first

    @property
    def shape(self) -> Any:
        shape = tf.TensorShape(self.variable.shape)
        return shape if shape.is_fully_defined() else view_of(self.variable).shape

    @property
    def dtype(self) -> str:
        return tf.as_dtype(self.variable.dtype).name

    def numpy(self) -> np.ndarray:
        return np.array(view_of(self.variable))

    def assign(self, value: Any) -> None:
        if self._is_first is None:
            self.variable.assign(value)
        else:
            assign_total(self.variable, value, self._is_first)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable, dtype)


def unique_names(names: Sequence[str]) -> list[str]:
    """`names` with `#2`, `#3`, ... after repeated ones."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def built_optimizers(model: Any) -> list[Any]:
    """The optimizers that `model` holds; the compiled one is built if possible, because its slots
    are part of the state. Those of a model that is cut into stages are built by its backend, with
    slots only where their variables are."""
    main = getattr(model, "optimizer", None)
    if (
        placement_of(model) is None
        and main is not None
        and not main.built
        and model.built
        and model.trainable_variables
    ):
        main.build(model.trainable_variables)
    return list(optimizers_of(model))


def all_variables(model: Any) -> list[tuple[str, Any]]:
    """(unique name, variable) of all variables of a step but metrics: weights, statistics, seed
    generators, and the optimizers' slots, counters and learning rates.

    The same on every process, whether or not it holds the values (see `placement_of`).
    """
    names = [f"model/{v.path}" for v in model.variables]
    variables = list(model.variables)
    for i, optimizer in enumerate(built_optimizers(model)):
        # Not the path, which depends on the scope in which the optimizer was built.
        names += [f"optimizer/{i}/{k}:{v.name}" for k, v in enumerate(optimizer.variables)]
        variables += optimizer.variables
    return list(zip(unique_names(names), variables, strict=True))


def attribute_variables(model: Any, metrics: bool = True) -> list[tuple[str, StateVariable]]:
    """(unique name, variable) of each `tf.Variable`, and of the state of each
    `tf.random.Generator`, that a layer of `model`, its loss or an optimizer has as an attribute, or
    in a list, dict or `tf.Module` there; also Keras' variables and seeds of a loss, of a schedule,
    or of a metric that `model.metrics` does not list. Keras does not know of them. The same names
    in each process.

    None of a model that is cut into stages, where only the stage of a layer has its values, nor
    variables that have a value for each replica.

    Args:
        metrics: whether those of metrics count, which differ between ranks.
    """
    if placement_of(model) is not None:
        return []
    known = [*model.variables, *model.metrics_variables]
    known += [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    if not metrics:
        layers = model._flatten_layers(include_self=True, recursive=True)
        known += [v for layer in layers for m in layer._metrics for v in m.variables]
    seen = {id(inner_variable(v)) for v in known}
    found = []
    layers = named_layers(model)
    for entered in (None, set[int]()):  # those that earlier checkpoints have keep their names
        inside = (
            _inside(vars(of), f"{ATTRIBUTE}{n}", entered=entered, metrics=metrics)
            for of, n in layers
        )
        for each in itertools.chain.from_iterable(inside):
            dtype = tf.as_dtype(each.variable.dtype)
            numeric = dtype.is_floating or dtype.is_integer or dtype.is_bool
            inner = inner_variable(each)
            if numeric and id(inner) not in seen:
                seen.add(id(inner))
                found.append(each)
    return list(zip(unique_names([each.path for each in found]), found, strict=True))


def inner_variable(variable: Any) -> Any:
    """TensorFlow's variable inside of a `StateVariable` or a variable of Keras."""
    variable = getattr(variable, "variable", variable)
    return getattr(variable, "_value", variable)


def layer_arrays(model: Any) -> list[tuple[str, np.ndarray]]:
    """(name, array) of the numeric arrays, and eager tensors, that layers have as attributes, also
    in lists and tuples."""
    found = []
    for layer, name in named_layers(model):
        for key, value in vars(layer).items():
            several = value if isinstance(value, (list, tuple)) else [value]
            for k, each in enumerate(several):
                if key not in _PER_CALL and _is_numeric(each):
                    found.append((f"{name}/{key}" + f"/{k}" * (several is value), np.asarray(each)))
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tf.__internal__.EagerTensor):
        return value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub"


def named_layers(model: Any) -> list[tuple[Any, str]]:
    """(layer, unique name) of all layers, with the same names in each process."""
    layers = list(model._flatten_layers(include_self=True, recursive=True))
    names = unique_names([_name_in_any_process(layer) for layer in layers])
    return list(zip(layers, names, strict=True))


def lookup_layers(model: Any) -> list[tuple[Any, str]]:
    """(layer, unique name) of the layers of `model` that have a vocabulary, at any depth. That
    inside of a `TextVectorization` has the name of this."""
    kinds = (keras.layers.StringLookup, keras.layers.IntegerLookup)
    found, outer = [], dict[int, str]()
    for layer, name in named_layers(model):
        if isinstance(layer, keras.layers.TextVectorization):
            outer |= {id(each): name for each in layer._flatten_layers(include_self=False)}
        elif isinstance(layer, kinds):
            found.append((layer, outer.get(id(layer), name)))
    return found


def vocabulary_digests(model: Any) -> dict[str, str]:
    """The size and a digest of each vocabulary, in order and with tf-idf weights, by the name of
    its layer. `get_config` describes none that was adapted."""
    return {name: _vocabulary_digest(layer) for layer, name in lookup_layers(model)}


def _vocabulary_digest(layer: Any) -> str:
    table = layer.lookup_table  # another one after `adapt`
    if table not in _digests:
        pairs = (
            [each.numpy() for each in table.export()] if int(table.size()) else [np.zeros(0)] * 2
        )
        words, places = reversed(pairs) if layer.invert else pairs
        digest = hashlib.blake2b(repr(words[np.argsort(places)].tolist()).encode(), digest_size=6)
        if layer.output_mode == "tf_idf" and len(words):
            digest.update(np.asarray(layer.idf_weights_const).tobytes())
        _digests[table] = f"{len(words)} words, {digest.hexdigest()}"
    return _digests[table]


def _name_in_any_process(layer: Any) -> str:
    """A layer's name without the number that Keras may have given it, by the process' history."""
    kind = to_snake_case(type(layer).__name__)
    return kind if re.fullmatch(rf"{kind}_\d+", layer.name) else str(layer.name)


def _inside(
    value: Any,
    path: str,
    depth: int = 0,
    of_keras: bool = False,
    entered: set[int] | None = None,
    metrics: bool = True,
) -> Iterator[StateVariable]:
    """Variables and generators that `value` is or has, in up to three nested lists and dicts.

    Args:
        of_keras: those of Keras, too, as in losses, optimizers and the like. What a layer has
            besides its weights, such as what it remembers, is not of a run.
        entered: ids of losses, optimizers and the like that were looked into. Each is looked into
            once, and as deep as a layer is. None: no deeper than from the layer that has them,
            which finds less: the variables that checkpoints of earlier versions have.
        metrics: whether to look into metrics, too, where `entered` is given.
    """
    if of_keras and isinstance(value, keras.random.SeedGenerator):
        value = value.state
    if of_keras and isinstance(value, keras.Variable):
        yield StateVariable(path, value)
    elif isinstance(value, tf.Variable):
        if value.synchronization != tf.VariableSynchronization.ON_READ:
            yield StateVariable(path, value)
    elif isinstance(value, tf.random.Generator):
        yield StateVariable(path, value.state, of_generator=True)
    elif isinstance(value, tf.Module):
        kinds = (tf.Variable, tf.random.Generator)
        found = value._flatten(predicate=lambda each: isinstance(each, kinds))
        yield from _inside(list(found), path, depth, of_keras, entered, metrics)
    elif isinstance(value, _WITH_STATE):
        if entered is None and depth < 3:
            yield from _inside(vars(value), path, depth, True)
        elif entered is not None and id(value) not in entered:
            entered.add(id(value))
            if metrics or not isinstance(value, keras.Metric):
                yield from _inside(vars(value), path, 0, True, entered, metrics)
    elif depth >= 3:
        return
    elif isinstance(value, (list, tuple)):
        for k, each in enumerate(value):
            yield from _inside(each, f"{path}/{k}", depth + 1, of_keras, entered, metrics)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            if key not in _ALIASES and not (of_keras and key == _OF_KERAS):
                yield from _inside(
                    value[key], f"{path}/{key}", depth + 1, of_keras, entered, metrics
                )


def variables_in(value: Any) -> list[Any]:
    """The variables, TensorFlow's and those of Keras' losses, optimizers and the like, and the
    states of random generators, that `value` is or has."""
    return [each.variable for each in _inside(value, "", entered=set())]


def model_variables(model: Any) -> list[tuple[str, Any]]:
    """Those of `all_variables` whose values are in this process."""
    placement = placement_of(model)
    named = all_variables(model)
    return named if placement is None else [(n, v) for n, v in named if placement.holds(v)]


def view_of(variable: Any) -> np.ndarray:
    """The values of a variable, read-only and without a copy if they are in host memory
    (`variable.numpy()` copies). They do not change with the variable."""
    value = getattr(variable, "_value", variable)
    if type(value) in _RESOURCE_VARIABLES:  # one operation, not three
        return np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    return np.asarray(tf.convert_to_tensor(variable))


def views_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """`view_of` of each; variables on one device are read in one operation, as starting an
    operation takes longer than copying a scalar."""
    values = [getattr(variable, "_value", variable) for variable in variables]
    plain = all(type(value) in _RESOURCE_VARIABLES for value in values)
    if not plain or len({value.device for value in values}) != 1:
        return [view_of(variable) for variable in variables]
    dtypes = [value.dtype.as_datatype_enum for value in values]
    attributes = ("N", len(values), "dtypes", dtypes)
    handles = [value.handle for value in values]
    read = execute(b"_ReadVariablesOp", len(values), handles, attributes, context())
    return [np.asarray(tensor) for tensor in read]
