"""States of a loop that `elastic.run` brings back to their last commit when ranks are lost.

The interface is that of Horovod. Unlike there, a commit copies attributes, so that a list which
changes later is restored too; and `sync` gives all ranks what rank 0 has now, in variables and
attributes alike, not attributes of an earlier commit.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ktrainer.dataparallel.objects import (
    broadcast_object,
    broadcast_variables,
    refuse_session,
    variables_of,
)
from ktrainer.dataparallel.state import opened
from ktrainer.errors import ConfigError, ModelError


class State(ABC):
    """Abstract state: `save`, `restore` and `sync` are a subclass's.

    Args:
        bcast_object: sends an object from rank 0 to all; default: `broadcast_object`.
        get_rank: changes nothing.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._look_for_ranks: Callable[[], None] | None = None  # set by `elastic.run`
        self.updaters: dict[Any, Any] = {}  # callbacks that set attributes while `fit` runs

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called, on the ranks that were there before, whenever ranks were lost or
        have joined: to change what depends on their number. Then all get rank 0's state."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory, and let ranks join that are ready. All ranks call it at the
        same step.

        Raises:
            ModelError: an optimizer is between two of its `backward_passes_per_step`.
            HostsUpdatedInterrupt: a rank joins.
        """
        _refuse_half_updates()
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let ranks join that are ready. All ranks call it at the same step, with equal states.

        Raises:
            ModelError: as for `commit`.
            HostsUpdatedInterrupt: a rank joins.
        """
        _refuse_half_updates()
        if self._look_for_ranks is not None:
            self._look_for_ranks()

    @abstractmethod
    def save(self) -> None:
        """Keep the present state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Return to the state that was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it."""

    def reset(self) -> None:  # noqa: B027 - most states have nothing to do
        """Called after the ranks have changed, before `sync`."""


class ObjectState(State):
    """Picklable objects, as attributes: `ObjectState(epoch=0)` has an attribute `epoch`.

    Args:
        bcast_object, get_rank: as for `State`.
        **kwargs: the attributes. They are copied by `copy.deepcopy`.

    Raises:
        ConfigError: an attribute has the name of a method.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        for name in kwargs:
            if hasattr(self, name):
                raise ConfigError("a state has this name already; take another one", path=name)
        self._saved_state = kwargs
        self._set_attributes()
        self.save()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        now = {name: getattr(self, name) for name in self._saved_state}
        for name, value in (self._bcast_object(now) if now else now).items():
            setattr(self, name, value)
        # Last: if rank 0 is lost before, `restore` returns to the whole commit before.
        self.save()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class TensorFlowState(ObjectState):
    """Variables, and objects as attributes.

    Args:
        variables: the same ones, by shape and type, on every rank.
        session: only None.
        **kwargs: the attributes.

    Raises:
        ModelError: no variables are given.
    """

    def __init__(self, variables: Any = None, session: None = None, **kwargs: Any) -> None:
        refuse_session(session)
        self.variables = variables_of(variables or [])
        if not self.variables:
            raise ModelError(
                "TensorFlowState needs variables: there is no collection of all of them in "
                "TensorFlow 2. Give variables=[*model.variables, *optimizer.variables]."
            )
        super().__init__(**kwargs)

    def save(self) -> None:
        # TensorFlow copies the memory of a variable when it is written while this refers to it.
        self._values = [tf.identity(tf.convert_to_tensor(v)) for v in self.variables]
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables, root_rank=0)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A Keras model with its optimizer, and objects as attributes.

    Args:
        model: a built Keras 3 model.
        optimizer: built for the model's trainable variables; None: the model's own.
        backend: changes nothing.
        **kwargs: the attributes, such as `batch=0, epoch=0`.

    Attributes:
        variables: those of the model, with its seeds, and of the optimizer.

    Raises:
        ModelError: the model, or the optimizer, is not built or missing.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ModelError(
                "the state of a model needs its optimizer: compile the model, or give optimizer=."
            )
        every = [*variables_of(self.model), *variables_of(self.optimizer)]
        super().__init__(list({id(variable): variable for variable in every}.values()), **kwargs)


def _refuse_half_updates() -> None:
    if any(aggregation.begun for aggregation in opened().aggregations):
        raise ModelError(
            "a commit between two of backward_passes_per_step would lose the gradients that are "
            "added up already. Commit after every so many steps."
        )


KerasState = TensorFlowKerasState
