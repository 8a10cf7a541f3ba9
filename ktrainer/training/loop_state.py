"""The state of a loop of the user's own, in the shape in which a run keeps the state of a model.

Checkpoints, the broadcast of weights, the learning rate and recovery all take a Keras model. What
`trainer.steps` is given (models, optimizers, metrics, variables, random generators) becomes one:
`LoopModel`. Plain values of `state={...}` are the state of a callback, `LoopValues`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import Callback
from ktrainer.errors import DivergenceError, ModelError
from ktrainer.steps.named_variables import StateVariable

_PLAIN = (bool, int, float, str, type(None), np.ndarray, np.number, np.bool_)


class LoopModel(keras.Model):
    """Models, optimizers and variables of a loop, as one model that is never called.

    Args:
        models: built Keras models or layers.
        optimizers: one of them is built for all weights of the models; several are left as they
            are.
        state: the user's, nested in dicts and lists.
        is_first: whether this process has the first replica.

    Raises:
        ModelError: something is not built, or is nothing that a checkpoint can hold.
    """

    def __init__(
        self,
        models: list[Any],
        optimizers: list[Any],
        state: dict[str, Any],
        is_first: bool = True,
    ) -> None:
        super().__init__(name="loop")
        more: list[StateVariable] = []
        models, optimizers = list(models), list(optimizers)
        for path, value in _tracked(state, "state"):
            if isinstance(value, keras.optimizers.Optimizer):
                optimizers.append(value)
            elif isinstance(value, keras.Layer):
                models.append(value)
            else:
                more += [
                    StateVariable(*each, is_first=is_first) for each in _variables(path, value)
                ]
        _check_built(models, optimizers)
        self.parts = models
        if len(optimizers) == 1:
            self.optimizer = optimizers[0]
        else:
            self.optimizers = optimizers
        self._more = _Untracked(more)
        self.built = True

    @property
    def variables(self) -> list[Any]:
        known = super().variables
        seen = {id(v) for v in known}
        return [*known, *(v for v in self._more.values if id(v.variable) not in seen)]

    @property
    def more(self) -> list[StateVariable]:
        """The variables that belong to none of the models."""
        return list(self._more.values)

    # A loop's metrics are part of its state: all ranks have them alike.

    @property
    def metrics(self) -> list[Any]:
        return []

    @property
    def metrics_variables(self) -> list[Any]:
        return []

    def reset_metrics(self) -> None:
        """Leave metrics to the loop."""


class _Untracked:
    """Values that Keras is not to look at."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values


class LoopValues(Callback):
    """Keeps the plain values of a loop's `state` in its checkpoints.

    A checkpoint holds those of rank 0, so they are compared at the end of each epoch.

    Args:
        state: the user's dict, whose values change in place.

    Raises:
        DivergenceError: ranks have different values, or variables; it names them.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        for key, value in state.items():
            path = f"state/{key}"
            _check_plain(value, path, any(_tracked(value, path)))
        self._state = state
        self._known = {id(value) for _, value in _tracked(state, "state")}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.world.size == 1:
            return
        mine = {f"state/{key}": _bytes_of(_saved(value)) for key, value in self._plain()}
        mine |= {v.path: v.numpy().tobytes() for v in self.model.more}
        digests = {path: zlib.crc32(value) for path, value in mine.items()}
        every = self.world.allgather(digests, "comparison of a loop's state")
        differ = [path for path in every[0] if len({each.get(path) for each in every}) > 1]
        if differ or len({len(each) for each in every}) > 1:
            raise DivergenceError(
                f"ranks have different values of {', '.join(differ) or 'other names in state'}, "
                "and a checkpoint keeps only those of rank 0. Reduce them over ranks "
                "(trainer.reduce, or metrics inside of the step), or leave them out of "
                "trainer.steps(state={...})"
            )

    def state_dict(self) -> dict[str, Any]:
        for path, value in _tracked(self._state, "state"):
            if id(value) not in self._known:
                raise ModelError(
                    f"{path} was put there after the loop had begun, so checkpoints would miss it. "
                    "Make it before, and give it to trainer.steps(state={...})"
                )
        return {"values": {key: _saved(value) for key, value in self._plain()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.get("values", {}).items():
            _load(self._state, key, copy.deepcopy(value))

    def _plain(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._state.items():
            if not any(_tracked(value, f"state/{key}")):
                yield key, value


def _check_plain(value: Any, path: str, has_tracked: bool) -> None:
    """Refuse plain values that would not come back as they are.

    Args:
        has_tracked: whether variables or objects with variables are beside it.

    Raises:
        ModelError: naming the value.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            if not has_tracked and not isinstance(key, str):
                raise ModelError(f"{path} has the key {key!r}: a checkpoint keeps strings alone")
            _refuse_tuple(each, f"{path}/{key}", has_tracked)
            _check_plain(each, f"{path}/{key}", has_tracked)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            _refuse_tuple(each, f"{path}/{number}", has_tracked)
            _check_plain(each, f"{path}/{number}", has_tracked)
    elif has_tracked and isinstance(value, _PLAIN) and value is not None:
        raise ModelError(
            f"{path} is a plain value beside variables, or objects that have some. Give it a place "
            "of its own in state={...}, as checkpoints keep the two in different ways"
        )


def _refuse_tuple(value: Any, path: str, has_tracked: bool) -> None:
    """Refuse a tuple inside of a plain value, which would come back as a list."""
    if isinstance(value, tuple) and not has_tracked:
        raise ModelError(f"{path} is a tuple: a checkpoint keeps lists. Use one")


def _bytes_of(value: Any) -> bytes:
    """All of a value, for comparison."""
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes_of(value[key]) for key in sorted(value))
    if isinstance(value, list):
        return b"[" + b",".join(map(_bytes_of, value)) + b"]"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return repr(value).encode()


def _load(state: dict[str, Any], key: str, value: Any) -> None:
    """Put a saved value in its place, in the list or dict that is there already."""
    present = state.get(key)
    if isinstance(present, np.random.Generator):
        present.bit_generator.state = value
    elif isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    elif isinstance(present, tuple) and isinstance(value, list):
        state[key] = tuple(value)
    else:
        state[key] = value


def _saved(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, (np.number, np.bool_)):
        return value.item()
    if isinstance(value, dict):
        return {key: _saved(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_saved(each) for each in value]
    return copy.deepcopy(value)


def _tracked(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, object) of all in `value` that is no plain value.

    Raises:
        ModelError: a checkpoint cannot hold it.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _tracked(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _tracked(each, f"{path}/{number}")
    elif isinstance(value, np.random.Generator) and path.count("/") == 1:
        return
    elif not isinstance(value, _PLAIN):
        if not isinstance(value, _KINDS):
            raise ModelError(
                f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Give models, "
                "optimizers, metrics, variables, keras.random.SeedGenerator, tf.random.Generator, "
                "np.random.Generator (not nested), numbers, strings, arrays, and lists and dicts "
                "of these"
            )
        yield path, value


_KINDS = (
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.Metric,
    keras.Variable,
    keras.random.SeedGenerator,
    tf.Variable,
    tf.random.Generator,
)


def _variables(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, keras.Metric):
        # F1Score and its like make their variables in their first update, R2Score some of them.
        update = "pdate it once (a batch of zeros will do), and call its reset_state(), before"
        if not getattr(value, "_built", True):
            raise ModelError(
                f"{path}, {type(value).__name__}, makes its variables in its first update, so "
                f"there is nothing to save or restore. U{update} trainer.steps"
            )
        if not value.variables and not hasattr(value, "_built"):
            raise ModelError(
                f"{path}, {type(value).__name__}, has no Keras variables, so there is nothing to "
                f"save or restore. If it makes them in its first update, u{update} trainer.steps; "
                "else make them with add_variable, or leave it out of state={...}"
            )
        return [(f"{path}/{k}:{v.name}", v) for k, v in enumerate(value.variables)]
    if isinstance(value, (keras.random.SeedGenerator, tf.random.Generator)):
        return [(path, value.state)]
    return [(path, value)]


def _check_built(models: list[Any], optimizers: list[Any]) -> None:
    for value in models:
        if not isinstance(value, keras.Layer):
            raise ModelError(f"trainer.steps(model=...) takes Keras models, not {type(value)}")
        if not value.built:
            raise ModelError(
                f"the model {value.name!r} has no variables yet, so there is nothing to save or "
                "restore. Give it an Input layer, or call model.build(input_shape)"
            )
    for value in optimizers:
        if not isinstance(value, keras.optimizers.Optimizer):
            raise ModelError(
                f"trainer.steps(optimizer=...) takes Keras 3 optimizers, not {type(value)}"
            )


def as_list(value: Any) -> list[Any]:
    """One object, or several in a list, tuple or dict, as a list; None as an empty one."""
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]
