"""State that each replica's thread has of its own while a step is traced."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from tensorflow.python.distribute import distribute_lib

from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import (
    Replacement,
    as_in_this_thread,
    is_entered,
    replaced,
    replaced_in,
)
from ktrainer.steps.step_context import StepContext, TracedContext
from ktrainer.steps.variable_assignments import aggregation_of, assignments, constant_of

# What Keras keeps by thread, and was set or made in the main one.
_SETTINGS = ("dtype_policy", "flash_attention", seed_generator.GLOBAL_SEED_GENERATOR)


class ReplicaContexts(TracedContext):
    """Each replica's `StepContext`, as one object: `keras_patches` are the same for all.

    Attributes are those of the context that the present thread has entered.

    Args:
        first: gives, of the values of all replicas of this process, that of the first.
    """

    _threads: threading.local
    _first: Callable[[Any], Any]

    def __init__(self, first: Callable[[Any], Any]) -> None:
        object.__setattr__(self, "_threads", threading.local())
        object.__setattr__(self, "_first", first)

    def as_one(self) -> StepContext:
        """The same object, as the `StepContext` that it stands for."""
        return cast("StepContext", self)

    @contextmanager
    def entered(self, context: StepContext) -> Iterator[None]:
        """Let this thread's context be `context`."""
        before = getattr(self._threads, "context", None)
        self._threads.context = context
        try:
            yield
        finally:
            self._threads.context = before

    @property
    def here(self) -> StepContext:
        """The context that this thread has entered.

        Raises:
            LookupError: it has entered none.
        """
        context: StepContext | None = getattr(self._threads, "context", None)
        if context is None:
            raise LookupError("no replica's step is traced in this thread")
        return context

    def call_once(self, action: Callable[[list[Any]], Any], values: list[Any]) -> None:
        """Call `action` once for all replicas, outside of them, in this thread's context.

        Args:
            values: tensors of this replica, or None; `action` gets those of the first replica.
        """
        context, first = self.here, self._first

        @tf.autograph.experimental.do_not_convert
        def once(_: Any, parts: list[Any]) -> None:
            with self.entered(context), outside_stateless_scope():
                action([None if part is None else first(part) for part in parts])

        tf.distribute.get_replica_context().merge_call(once, args=(values,))

    def update_once(
        self, optimizer: Any, update: Callable[[list[Any]], Any], gradients: list[Any]
    ) -> None:
        """Call `update` once for all replicas, with variables of the optimizer, such as its
        learning rate, as the step has assigned them."""
        scope = replica_scope()
        changes = [] if scope is None else scope.taken(optimizer.variables)

        def assign_and_update(values: list[Any]) -> None:
            for (variable, _), value in zip(changes, values, strict=False):
                variable.assign(value)
            update(values[len(changes) :])

        self.call_once(
            assign_and_update, [*(self.of_first_replica(v) for _, v in changes), *gradients]
        )

    def of_first_replica(self, value: tf.Tensor) -> tf.Tensor:
        """`value`, of which `call_once` takes that of the first replica of all processes."""
        context, strategy = self.here, tf.distribute.get_strategy()
        collectives = context.collectives
        if collectives is None or len(strategy.extended.worker_devices) == collectives.size:
            return value
        mine = tf.where(tf.equal(context.rank, 0), value, tf.zeros_like(value))
        return collectives.sum(mine, context.order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.here, name, value)


class ReplicaScope(keras.StatelessScope):
    """Keeps what a replica assigns, and gives the other variables as they are.

    Args:
        starts: metrics' variables, and the values that the replica adds to.
        assign_weight: what is done with a value for a variable that is trained, which is read,
            and differentiated by, where it is.
        noted: notes what is assigned too, by id.

    Attributes:
        assigned: the variables that were assigned, by id.
        constants: values that sums were given, as `reset_state` assigns them, by id.
        losses_of: what layers have passed to `add_loss`, by the layer's id.
    """

    def __init__(
        self,
        starts: Sequence[tuple[Any, tf.Tensor]],
        assign_weight: Callable[[Any, Any], None],
        noted: dict[int, Any],
    ) -> None:
        super().__init__(starts, initialize_variables=False)
        self.assigned: dict[int, Any] = {}
        self.constants: dict[int, np.ndarray] = {}
        self.losses_of: dict[int, list[Any]] = {}
        self._assign_weight, self._noted = assign_weight, noted
        self._starts = dict(self.state_mapping)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if variable.trainable:
            self._assign_weight(variable, value)
            return
        if aggregation_of(variable) == "sum" and (constant := constant_of(value)) is not None:
            self.constants[id(variable)] = constant
        self.assigned[id(variable)] = self._noted[id(variable)] = variable
        super().add_update((variable, tf.cast(value, variable.dtype)))

    def note_reset(self, variables: Iterable[Any]) -> None:
        """Note that a metric's `reset_state` has set these, where a step runs eagerly."""
        for variable in variables:
            if id(variable) in self.assigned:
                self.constants[id(variable)] = np.asarray(self.state_mapping[id(variable)])

    def before(self, variable: Any) -> tf.Tensor:
        """The value that the replica's additions started from."""
        if id(variable) in self.constants:
            return tf.cast(self.constants[id(variable)], variable.dtype)
        if id(variable) in self._starts:
            return self._starts[id(variable)]
        return tf.identity(variable._value)

    def taken(self, variables: Iterable[Any]) -> list[tuple[Any, tf.Tensor]]:
        """Those of `variables` that were assigned, and their values, which are kept no longer."""
        places = [id(v) for v in variables if id(v) in self.assigned]
        return [(self.assigned.pop(place), self.state_mapping.pop(place)) for place in places]

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        # Keras asks a scope for the weights of a regularization loss, which it does not hold.
        return variable._value if value is None else value


@contextmanager
def losses_by_replica() -> Iterator[None]:
    """Keep what layers add as losses in the scope of each replica.

    Keras keeps them in the layer, of which there is one: a replica would find, or clear, those of
    another whose turn has come in the middle of its call.
    """
    layer = keras.layers.Layer
    names = ("add_loss", "_get_own_losses", "_clear_losses")
    originals = [getattr(layer, name) for name in names]

    def add_loss(self: Any, loss: Any) -> None:
        if (scope := replica_scope()) is None:
            originals[0](self, loss)
        else:
            scope.losses_of.setdefault(id(self), []).extend(keras.tree.flatten(loss))

    def own_losses(self: Any) -> Any:
        scope = replica_scope()
        return originals[1](self) if scope is None else scope.losses_of.get(id(self), [])[:]

    def clear_losses(self: Any) -> None:
        if (scope := replica_scope()) is None:
            originals[2](self)
            return
        scope.losses_of.pop(id(self), None)
        for inner in self._layers:
            inner._clear_losses()

    functions = (add_loss, own_losses, clear_losses)
    with replaced(*((layer, name, f) for name, f in zip(names, functions, strict=True))):
        yield


def replica_scope() -> ReplicaScope | None:
    """The scope that this thread is in."""
    scope = global_state.get_global_attribute("stateless_scope")
    return scope if isinstance(scope, ReplicaScope) else None


@contextmanager
def assigned_once(contexts: ReplicaContexts) -> Iterator[None]:
    """Refuse what replicas assign to a `tf.Variable` outside of the strategy: each one would."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: Any, *args: Any, **named: Any) -> Any:
            apart = (variable, getattr(variable, "handle", None))
            in_strategy = any(hasattr(each, "_distributed_container") for each in apart)
            if replica_scope() is not None and not in_strategy:
                raise ModelError(
                    f"a step assigns to {variable.name}, a tf.Variable outside of the strategy, "
                    "which every replica would do. Make it with add_weight(trainable=False)."
                )
            return original(variable, *args, **named)

        return assign

    with replaced_in(contexts, assignments(refusing)):
        yield


@contextmanager
def outside_stateless_scope() -> Iterator[None]:
    """Let assignments reach the variables themselves, also within a `StatelessScope`."""
    before = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", before)


def with_settings_of_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for another thread: it finds the Keras settings that this one has, and traces the
    same step."""
    function = as_in_this_thread(function)
    settings = {name: global_state.get_global_attribute(name) for name in _SETTINGS}

    def called_elsewhere(*args: Any) -> Any:
        for name, value in settings.items():
            if value is not None and global_state.get_global_attribute(name) is None:
                global_state.set_global_attribute(name, value)
        return function(*args)

    return called_elsewhere


@contextmanager
def keras_as_one_replica() -> Iterator[None]:
    """Keep Keras from doing what this package does: it scales losses by the number of replicas,
    and meets the other replicas inside of an optimizer's update, of which there is one here."""
    interim = tf.__internal__.distribute.interim
    optimizer = keras.optimizers.LossScaleOptimizer
    with replaced(
        (loss_module, "scale_loss_for_distribution", lambda value: value),
        (loss_module, "unscale_loss_for_distribution", lambda value: value),
        (interim, "maybe_merge_call", lambda fn, strategy, *a, **k: fn(strategy, *a, **k)),
        (optimizer, "_tf_apply", optimizer._common_apply),
    ):
        yield


@contextmanager
def traced_on_replicas(contexts: ReplicaContexts, count: int) -> Iterator[None]:
    """Replace what must be different in Keras and TensorFlow while any step is traced on replicas.

    Args:
        count: replicas in this process.
    """
    with ExitStack() as stack:
        stack.enter_context(keras_as_one_replica())
        stack.enter_context(losses_by_replica())
        if count > 1:
            stack.enter_context(assigned_once(contexts))
        yield


@contextmanager
def averages_of_own_rows(contexts: ReplicaContexts, warns: bool) -> Iterator[None]:
    """Let what TensorFlow divides by the number of replicas be that of one replica, in a step of
    `fit`: there the losses of replicas are means, and their weighted mean counts.

    Args:
        contexts: the replicas whose steps are traced.
        warns: whether a step that reads the number itself, and gets it, is warned of.
    """
    owners = (distribute_lib.StrategyBase, distribute_lib.ReplicaContextBase)
    with replaced(*(_count_of_replicas(contexts, owner, warns) for owner in owners)):
        yield


def _count_of_replicas(contexts: ReplicaContexts, owner: type, warns: bool) -> Replacement:
    original: Any = vars(owner)["num_replicas_in_sync"]

    def get(self: Any) -> Any:
        count = original.fget(self)
        if not is_entered(contexts):
            return count
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller == "tensorflow.python.ops.nn_impl_distribute":
            return 1
        if warns and count > 1 and not caller.startswith(("tensorflow.", "keras.", "ktrainer.")):
            warnings.warn(
                f"a train_step under fit reads num_replicas_in_sync, which is {count}. There the "
                "gradients of replicas are averaged, weighted by their rows. If the loss is "
                "divided by that number, remove the division: it makes gradients too small. Else "
                "nothing is to be done.",
                stacklevel=2,
            )
        return count

    return owner, "num_replicas_in_sync", property(get)


def leave_weight(_: Any, __: Any) -> None:
    """Assign nothing to a weight: a step that only counts changes none."""


def refuse_weight(variable: Any, _: Any) -> None:
    """Refuse to assign a weight in a step that XLA compiles.

    Raises:
        ModelError: naming the weight.
    """
    raise ModelError(
        f"a layer or step assigns the weight {variable.path}, as SpectralNormalization does, which "
        "replicas do together and XLA cannot compile. Set trainer.xla=false."
    )
