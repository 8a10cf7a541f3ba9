"""Record the calls that a model makes on symbolic tensors, opening layers made of others."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional
from keras.src.ops.function import Function

from ktrainer.backends.pipeline.graph.call_hooks import Watcher, watching
from ktrainer.backends.pipeline.graph.stage_scopes import stage_of
from ktrainer.backends.pipeline.graph.untraceable import SideEffect, location_of, reason_of
from ktrainer.steps.step_helpers import has_own_steps

CALLED_BY_USER = "_ktrainer_called_by_user"  # attribute of models


@dataclass(eq=False)
class Scope:
    """An opened layer during one of its calls.

    Attributes:
        layer: the layer.
        parent: the opened layer that called it; None for the model itself.
        called_on: the stage of this call or of a surrounding one, if the user gave one.
        created_on: the stage that the layer, or one around it, was created on.
        pending: for a functional model, its own nodes yet to be called, by operation.
    """

    layer: Any
    parent: Scope | None = None
    called_on: int | None = None
    created_on: int | None = None
    pending: dict[int, deque] = field(default_factory=dict)

    @property
    def path(self) -> tuple[str, ...]:
        """Names of the layers from below the model down to this one."""
        return () if self.parent is None else (*self.parent.path, self.layer.name)


@dataclass(eq=False)
class Call:
    """A call that becomes a node: Keras' record of it and what surrounded it."""

    node: Any
    scope: Scope
    stage: int | None
    context: dict[str, Any]
    autocast: str | None
    masks: dict[int, Any]
    where: str | None
    named_by_user: bool
    closed: str | None

    @property
    def is_layer(self) -> bool:
        """True if a layer was called, False for an op."""
        return isinstance(self.node.operation, keras.layers.Layer)

    @property
    def carries_mask(self) -> bool:
        """True if it is an op whose output has a mask: a cast of a layer's masked input."""
        return not self.is_layer and backend.get_keras_mask(self.node.outputs[0]) is not None

    @property
    def masks_read(self) -> dict[int, Any]:
        """Masks that the call reads, by `id()` of the tensor that has them."""
        # A functional model has recorded the mask of a layer's only input as an argument.
        explicit = self.node.arguments.kwargs.get("mask") is not None
        read = (self.is_layer and not explicit) or self.carries_mask
        return {key: m for key, m in self.masks.items() if read and m is not None}


class CallRecorder(Watcher):
    """Calls of a model's layers and ops in the order in which they are made.

    Only a layer that is one node keeps its side effects, losses and assignments. Those in the
    `call` of an opened layer close it; in that of the model they are an error.

    Attributes:
        calls: the recorded calls.
        closed: layers that must stay one node, by `id()`, and why; layers are added that turn
            out not to work on symbolic tensors, or to have side effects, when opened.
        mixes: whether such a layer was opened in an earlier call, so that it must be recorded
            again with all calls alike.
    """

    def __init__(self, model: Any, closed: dict[int, str]) -> None:
        self.model = model
        self.closed = closed
        self.calls: list[Call] = []
        self.mixes = False
        self._made: list[Any] = []  # Keras' nodes, to be removed
        self._fresh: dict[int, Any] = {}
        self._scope: Scope | None = None
        self._opened: list[Any] = []
        self._ever_opened: set[int] = set()
        self._context: dict[int, dict[str, Any]] = {}
        self._inside = False  # a layer that is one node, while Keras infers its outputs

    def record(self, inputs: Any, training: bool) -> Any:
        """Call the model on symbolic inputs; gives its symbolic outputs."""
        self._scope = Scope(self.model)  # casts of the model's inputs are made before it is opened
        try:
            with watching(self):
                return self.model(inputs, **training_kwargs(self.model, training))
        finally:
            self._forget()

    def created(self, operation: Any) -> None:
        """Remember ops that exist for one call only: their automatic names say nothing."""
        self._fresh[id(operation)] = operation

    def symbolic_call(
        self, layer: Any, proceed: Callable[[], Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Outputs of a layer: those of its inner calls, if it can be opened."""
        if self._inside:
            return proceed()
        if self._opens(layer):
            mark, surrounding = (len(self.calls), len(self._opened)), self._scope
            self._scope = self._enter(layer)
            try:
                outputs = layer.call(*_with_lone_input_in_list(layer, args), **kwargs)
                _require_symbolic(outputs)
            except Exception as error:
                if layer is self.model:
                    raise
                self.closed[id(layer)] = _why(error)
                self.mixes |= id(layer) in self._ever_opened
                del self.calls[mark[0] :], self._opened[mark[1] :]
            else:
                self._opened.append(layer)
                self._ever_opened.add(id(layer))
                return outputs
            finally:
                self._scope = surrounding
        names = getattr(layer, "_call_context_args", ("training",))
        # Of the call, not of its arguments: `call` may leave it to the layers inside.
        resolved = global_state.get_global_attribute("current_call_ctx")
        context = {k: resolved.get_value(k) for k in names}
        self._context[id(layer)] = {k: v for k, v in context.items() if v is not None}
        self._inside = True
        try:
            return proceed()
        finally:
            self._inside = False

    def called(self, node: Any) -> None:
        """Keep a call, unless its inner calls were kept instead."""
        operation, scope = node.operation, self._scope
        self._made.append(node)
        if self._opened and self._opened[-1] is operation:
            self._opened.pop()
            self._origin(operation, take=True)
            return
        if scope is None or self._inside or isinstance(operation, keras.layers.InputLayer):
            return
        layer = isinstance(operation, keras.layers.Layer)
        autocast = backend.get_autocast_scope()
        self.calls.append(
            Call(
                node=node,
                scope=scope,
                stage=_stage(node, self._origin(operation, take=True), operation, scope),
                context=self._context.pop(id(operation), {}) if layer else {},
                autocast=autocast.dtype if autocast and not layer else None,
                masks={id(x): backend.get_keras_mask(x) for x in node.arguments.keras_tensors},
                where=location_of(sys._getframe(), until=CallRecorder.record.__code__),
                named_by_user=layer or id(operation) not in self._fresh,
                closed=self.closed.get(id(operation)),
            )
        )

    def changing(self, owner: Any) -> None:
        """Raise `SideEffect` where an opened layer adds a loss or assigns."""
        if not self._inside and not _is_seed(owner):
            raise SideEffect(_effect_on(owner, self._scope))

    def _opens(self, layer: Any) -> bool:
        if id(layer) in self.closed:
            return False
        if layer is self.model or isinstance(layer, keras.Model):
            return layer is self.model or layer.activity_regularizer is None
        # Keras' own layers made of others (wrappers, attention) rely on being called as a whole.
        keras_own = type(layer).__module__.partition(".")[0] == "keras"
        return bool(layer._layers) and not keras_own and layer.activity_regularizer is None

    def _enter(self, layer: Any) -> Scope:
        parent = None if layer is self.model else self._scope
        origin = self._origin(layer, take=False)
        called, created = stage_of(origin), stage_of(layer)
        functional = getattr(layer, "_functional", None) or layer
        return Scope(
            layer,
            parent,
            called if called is not None or parent is None else parent.called_on,
            created if created is not None or parent is None else parent.created_on,
            _nodes_by_operation(functional) if isinstance(functional, Function) else {},
        )

    def _origin(self, operation: Any, take: bool) -> Any:
        """The node of a functional model that is being called again, or None."""
        queue = self._scope.pending.get(id(operation)) if self._scope else None
        if not queue:
            return None
        return queue.popleft() if take else queue[0]

    def _forget(self) -> None:
        """Remove the nodes that recording has added to the layers of the user's model."""
        for node in self._made:
            _drop(node.operation._inbound_nodes, node)
            for tensor in node.arguments.keras_tensors:
                producer = tensor._keras_history.operation
                if producer is not None:
                    _drop(producer._outbound_nodes, node)


def training_kwargs(model: Any, training: bool) -> dict[str, bool]:
    """The `training` argument of a model's call. Keras' steps pass it only if `call` declares it. A
    user's step may pass it to any model; Keras then forwards it to the layers inside."""
    always = has_own_steps(model) or hasattr(model, CALLED_BY_USER)
    return {"training": training} if always or model._call_has_training_arg else {}


def _with_lone_input_in_list(layer: Any, args: Any) -> Any:
    """The arguments of a functional model that was made of a list of one input. Keras puts a lone
    tensor into a list by itself; with a symbolic one it warns."""
    if type(layer).call is not Functional.call or not args:
        return args
    inputs, *rest = args
    lone = isinstance(inputs, keras.KerasTensor) and isinstance(layer._inputs_struct, list)
    return ([inputs], *rest) if lone and len(layer._inputs_struct) == 1 else args


def _stage(node: Any, origin: Any, operation: Any, scope: Scope) -> int | None:
    """The user's stage of a call: calls come before creation, the innermost first."""
    candidates = (
        stage_of(node),
        stage_of(origin),
        scope.called_on,
        stage_of(operation),
        scope.created_on,
    )
    return next((stage for stage in candidates if stage is not None), None)


def _nodes_by_operation(function: Any) -> dict[int, deque]:
    """A functional model's nodes in the order in which it calls each operation."""
    pending: dict[int, deque] = defaultdict(deque)
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if not node.is_input:
                pending[id(node.operation)].append(node)
    return dict(pending)


def _require_symbolic(outputs: Any) -> None:
    for output in keras.tree.flatten(outputs):
        if not isinstance(output, keras.KerasTensor):
            kind = "a tensor with a value" if tf.is_tensor(output) else type(output).__name__
            raise TypeError(f"it returns {kind} that does not depend on its inputs")


def _is_seed(owner: Any) -> bool:
    """Return whether it is the state of a random generator. The graph refuses what that draws."""
    return "seed_generator_state" in owner.name


def _effect_on(owner: Any, scope: Scope | None) -> str:
    alone = "which only a layer that stays in one piece can"
    if isinstance(owner, keras.layers.Layer):
        if scope is not None and owner is not scope.layer:
            return (
                f"layer {owner.name!r}, which adds a loss, is called on a tensor that does not "
                "depend on the model's inputs"
            )
        return f"it adds a loss, {alone}"
    if isinstance(owner, keras.Variable):
        return f"it assigns the variable {owner.path!r}, {alone}"
    return (
        f"it assigns the tf.Variable {owner.name!r}, {alone}, where it is made with "
        "`self.add_weight(trainable=False)`"
    )


def _why(error: Exception) -> str:
    where = location_of(error.__traceback__)
    return f"{where}: {reason_of(error)}" if where else reason_of(error)


def _drop(nodes: list[Any], node: Any) -> None:
    for position in range(len(nodes) - 1, -1, -1):
        if nodes[position] is node:
            del nodes[position]
            return
