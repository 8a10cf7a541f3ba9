"""A model's graph as data: tensors, and the calls of layers and ops that make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext

from ktrainer.errors import DataError

# Keras' ops that can sum over the batch axis.
_REDUCTIONS = {"Sum", "Mean", "Prod", "Var", "Std", "Norm", "Dot", "Matmul", "Tensordot", "Einsum"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
        id: its number; a graph's tensors are numbered from 0, the inputs first.
        name: of the node that makes it, or of the input; `name.1` for a second output.
        shape: static shape; None for the batch dimension and others that are not known.
        dtype: for example `"float32"`.
        sparse: whether it is a SparseTensor.
    """

    id: int
    name: str
    shape: tuple[int | None, ...]
    dtype: str
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a tensor of the graph among a node's recorded arguments."""

    id: int


@dataclass(frozen=True, eq=False)
class Node:
    """One call of a layer or op.

    Attributes:
        name: path of the layer from the model down, for example `block_0/attention`; ops are
            numbered within the layer that calls them. Unique: a second call adds `:1`.
        operation: the `keras.layers.Layer` or `keras.Operation`, or a `Derived` tensor.
        inputs: ids of the tensors it needs, the masks of those that have one included.
        outputs: ids of the tensors that it makes, flat.
        trainable, non_trainable: the variables it reads, by whether they are trained; a seed
            generator's state is among the latter.
        args, kwargs: what it was called with, tensors replaced by `Ref`.
        masks: id of the Keras mask of each input that has one, where it reads masks.
        carries_mask: whether its output gets the mask of its input.
        context: the call's resolved context, `training` above all.
        autocast: the float type of variables in the surrounding layer, None for their own.
        stage: the stage that the user gave it with `partition(i)`, or None.
        where: file and line of the user's code that called it, where known.
        closed: why a layer made of others is one node all the same, or None.
    """

    name: str
    operation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    trainable: tuple[Any, ...] = ()
    non_trainable: tuple[Any, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[int, int] = field(default_factory=dict)
    carries_mask: bool = False
    context: Mapping[str, Any] = field(default_factory=dict)
    autocast: str | None = None
    stage: int | None = None
    where: str | None = None
    closed: str | None = None

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables that it reads."""
        return (*self.trainable, *self.non_trainable)

    @property
    def is_layer(self) -> bool:
        """True if it calls a layer, False for an op."""
        return isinstance(self.operation, keras.layers.Layer)

    def __call__(self, tensors: Mapping[int, Any]) -> tuple[Any, ...]:
        """Its outputs, flat, from the values of its `inputs` by id.

        The values may be tensors, eager or in a `tf.function`, or Keras' symbolic ones.
        """
        for of, mask in self.masks.items():
            if backend.get_keras_mask(tensors[of]) is None:
                backend.set_keras_mask(tensors[of], tensors[mask])

        def fill(value: Any) -> Any:
            return tensors[value.id] if isinstance(value, Ref) else value

        args, kwargs = keras.tree.map_structure(fill, (tuple(self.args), dict(self.kwargs)))
        scope = backend.AutocastScope(self.autocast) if self.autocast else nullcontext()
        # At the top of a graph TensorFlow refuses names that begin with `_`, as a layer's may.
        private = getattr(self.operation, "name", "").startswith("_")
        with scope, tf.name_scope("node") if private else nullcontext():
            result = self.operation(*args, **{**kwargs, **self.context})
        outputs = [] if result is None else keras.tree.flatten(result)  # a layer may only check
        if self.carries_mask:
            backend.set_keras_mask(outputs[0], backend.get_keras_mask(tensors[self.inputs[0]]))
        return tuple(outputs)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model's graph of layers and ops, for training or for inference.

    Attributes:
        nodes: in topological order.
        tensors: by id.
        inputs: ids of the model's inputs, flat.
        outputs: ids of the model's outputs, flat.
        input_structure, output_structure: nests of `Ref`, as the model takes and returns them.
        masks: tensor id -> id of its Keras mask, for tensors that have one.
        training: the mode it was traced in.
        unused: the model's variables that no node reads.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_structure: Any
    output_structure: Any
    masks: Mapping[int, int]
    training: bool
    unused: tuple[Any, ...] = ()

    @cached_property
    def variable_names(self) -> dict[int, str]:
        """A unique name of each variable that nodes read, by the variable's `id()`."""
        names: dict[int, str] = {}
        taken: dict[str, int] = {}
        for variable in (v for node in self.nodes for v in node.variables):
            if id(variable) not in names:
                path = variable.path
                count = taken[path] = taken.get(path, -1) + 1
                names[id(variable)] = f"{path}:{count}" if count else path
        return names

    @property
    def needed_at_the_end(self) -> tuple[int, ...]:
        """Ids of the outputs and of their masks, which Keras' losses look at."""
        masks = (self.masks[i] for i in self.outputs if i in self.masks)
        return tuple(dict.fromkeys((*self.outputs, *masks)))

    @property
    def coupling_node(self) -> Node | None:
        """The first sum or product over the batch axis that the outputs depend on, None if there is
        none; only ops that show in the graph, and whose result has no unknown axis."""
        used = {i for node in self.nodes for i in node.inputs} | set(self.outputs)
        floats = [t for t in self.tensors if "float" in t.dtype and t.id in used]
        batched = {t.id for t in floats if t.shape and t.shape[0] is None}
        reduced = {t.id for t in floats if None not in t.shape}
        for node in self.nodes:
            sums = type(node.operation).__name__ in _REDUCTIONS
            if sums and batched.intersection(node.inputs) and reduced.intersection(node.outputs):
                return node
        return None

    def compute(self, inputs: Any) -> Any:
        """The model's outputs, structured as the model returns them, node by node.

        Args:
            inputs: structured as the model's first argument.

        Raises:
            DataError: there are more or fewer tensors than the model has inputs.
        """
        flat = keras.tree.flatten(inputs)
        if len(flat) != len(self.inputs):
            wanted = ", ".join(self.tensors[i].name for i in self.inputs)
            raise DataError(
                f"the model takes {len(self.inputs)} inputs ({wanted}), but was given {len(flat)}"
            )
        tensors = {
            i: _as_tensor(value, self.tensors[i])
            for i, value in zip(self.inputs, flat, strict=True)
        }
        run_nodes(self.nodes, tensors)
        return keras.tree.map_structure(lambda ref: tensors[ref.id], self.output_structure)


def run_nodes(nodes: Iterable[Node], tensors: dict[int, Any]) -> None:
    """Call the nodes in order, as one call of a model, adding what they make to `tensors`.

    The losses of a layer, such as activity regularisation, are then those of all its calls.
    """
    nodes = list(nodes)
    with _one_call(nodes):
        for node in nodes:
            tensors.update(zip(node.outputs, node(tensors), strict=True))


@contextmanager
def _one_call(nodes: list[Node]) -> Iterator[None]:
    # Without a surrounding call each layer would be the outermost, and clear its own losses.
    before = global_state.get_global_attribute("current_call_ctx")
    if before is None:
        for node in nodes:
            if node.is_layer:
                node.operation._clear_losses()
        global_state.set_global_attribute("current_call_ctx", CallContext(entry_layer=None))
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


@contextmanager
def losses_collected(nodes: Iterable[Node]) -> Iterator[keras.StatelessScope]:
    """A scope in which nodes run on symbolic tensors; it has the losses that layers add there, and
    the layers keep those that they had."""
    kept = [(n.operation, set(n.operation._loss_ids)) for n in nodes if n.is_layer]
    try:
        with keras.StatelessScope(collect_losses=True, initialize_variables=False) as scope:
            yield scope
    finally:
        for layer, ids in kept:
            layer._loss_ids = ids


def last_uses(nodes: Sequence[Node], kept: Iterable[int] = ()) -> dict[int, int]:
    """Tensor id -> position of the last node that needs it; `len(nodes)` for those `kept`."""
    last = {i: position for position, node in enumerate(nodes) for i in node.inputs}
    return {**last, **dict.fromkeys(kept, len(nodes))}


def _as_tensor(value: Any, tensor: Tensor) -> Any:
    if isinstance(value, keras.KerasTensor):
        return value
    return keras.ops.convert_to_tensor(value, dtype=tensor.dtype, sparse=tensor.sparse)
