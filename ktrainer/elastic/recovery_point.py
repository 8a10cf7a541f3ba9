"""The moment that ranks return to when one is lost: shared values, variables, metric counts.

RecoveryPoint       a moment between two updates, as plain values
VariableBackup      the variables as they were at that moment
MetricCountsRow     counts of this rank alone, which the others know too
survivable_section  the part of a script in which ranks may be lost
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.learning_rate import plain_optimizers, velocities
from ktrainer.checkpoint.contents.capture_state import variables_here
from ktrainer.checkpoint.format.value_encoding import dtype_named
from ktrainer.data import ShuffleOrder
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.distributed.launcher_events import report_phase
from ktrainer.state.progress import Phase
from ktrainer.steps.metric_states import adds_up, leaf_metrics
from ktrainer.steps.optimizers import optimizers_of

_MOST = 1 << 16  # numbers of a rank's metrics that are announced after each update


@dataclass
class RecoveryPoint:
    """The values that all ranks share at a moment between two updates, weights apart.

    Attributes:
        phase: of the step that `progress` counts. The ranks that got furthest have the highest
            (step, phase).
        progress: counters, as a dict.
        callbacks_up_to: step and batch up to which all callbacks have run.
        logs: those of the step, for callbacks that have not heard of them, and for the epoch.
        history: Keras' History, as a dict.
        states, arrays: those of the callbacks, as in a checkpoint.
        stopped, out_of_time: whether training is to end, by a callback or the clock.
        update_invalid: whether the last update has spoilt the model.
        started: ranks at the start.
        run_dir: the run's folder.
        shuffle_order: the order of the data.
        lengths: batches of one pass over each kind of data, as far as they are known.
        facts: of configuration, model, data and versions; a joining rank must have the same.
    """

    phase: Phase = Phase.CALLBACKS_DONE
    progress: dict[str, Any] = field(default_factory=dict)
    callbacks_up_to: tuple[int, int] = (0, 0)
    logs: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    stopped: bool = False
    out_of_time: bool = False
    update_invalid: bool = False
    started: int = 0
    run_dir: str | None = None
    shuffle_order: ShuffleOrder | None = None
    lengths: list[int | None] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """(step, phase): the greater, the later."""
        return int(self.progress.get("step", -1)), self.phase


class VariableBackup:
    """The values of all variables of a model, its optimizers, metrics and seeds, as far as
    this process holds them.

    TensorFlow copies a variable's memory only when it is written while another reference to it
    exists, so a backup costs next to nothing, and memory only for the variables that change.

    Args:
        model: built, with its optimizers.
        several: whether one call may update weights more than once, or in parts. If not, weights
            and slots change at once at the end of a step, and are not kept during it.
    """

    def __init__(self, model: keras.Model, several: bool) -> None:
        named = [variable for _, variable in variables_here(model)]
        every = {id(v): v for v in [*named, *model.metrics_variables]}
        updated = set() if several else _updated(model)
        self._groups = {
            "always": [v for key, v in every.items() if key not in updated],
            "outside of steps": [v for key, v in every.items() if key in updated],
        }
        self._values: dict[str, list[tf.Tensor]] = {}
        self._read = {name: _reader(group) for name, group in self._groups.items()}

    def keep(self) -> None:
        """Remember the present values."""
        self._values = {name: read() for name, read in self._read.items()}

    def begin_step(self) -> None:
        """Let go of variables that a step changes only once nothing can interrupt it."""
        self._values.pop("outside of steps", None)

    def undo(self) -> None:
        """Restore the remembered values."""
        for name, values in self._values.items():
            for variable, value in zip(self._groups[name], values, strict=True):
                variable.assign(value)


def _updated(model: keras.Model) -> set[int]:
    """Ids of the variables that optimizers write: weights and slots. Left out is what callbacks
    write before a step, too: numbers such as the learning rate, and the slots that follow it."""
    found = set()
    followers = {id(v) for each in plain_optimizers(model) for v in velocities(each)}
    for optimizer in optimizers_of(model):
        slots = [v for v in optimizer.variables if tuple(v.shape) and id(v) not in followers]
        found |= {id(v) for v in [*getattr(optimizer, "_trainable_variables", []), *slots]}
    return found | {id(v) for v in model.trainable_variables}


def _reader(variables: list[Any]) -> Any:
    """A function of the variables' values, in one call."""
    inner = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    return tf.function(lambda: [tf.identity(v) for v in inner], autograph=False)


class MetricCountsRow:
    """Counts of this rank's metrics, as one row of a table over ranks.

    It is no part of the state that all ranks share, and would be lost with a rank; so the ranks
    exchange their rows after each update, in the message with which they vote.

    Args:
        model: built, with its metrics.
        only_sums: leave out metrics whose states do not add up: other ranks cannot take them over.

    Attributes:
        omitted: names of the metrics that are not in the row: these, and the largest ones, where
            all have too many numbers to be sent after each update.
    """

    def __init__(self, model: keras.Model, only_sums: bool = False) -> None:
        self._all = list(model.metrics_variables)
        self._announced: list[Any] = []
        self.omitted: list[str] = []
        room = _MOST
        # Each once: Keras lists a compiled metric twice if the model has it as an attribute, too.
        metrics = {id(metric): metric for metric in leaf_metrics(model)}.values()
        for metric in sorted(metrics, key=_size):
            if _size(metric) > room or (only_sums and not adds_up(metric)):
                self.omitted.append(metric.name)
            else:
                room -= _size(metric)
                self._announced += metric.variables

    def row(self) -> np.ndarray:
        """The states as one float64 vector."""
        states = [np.ravel(v.numpy()).astype(np.float64) for v in self._announced]
        return np.concatenate([np.zeros(0), *states])

    def states(self, row: np.ndarray | None = None) -> list[np.ndarray]:
        """The states of all metrics in a `row`, in their shapes and types, with zeros for the
        omitted ones; None: those of now."""
        if row is None:
            return [np.array(v.numpy()) for v in self._all]
        known = {id(variable): part for variable, part in self._parts(row)}
        parts = [known.get(id(v), np.zeros(tuple(v.shape))) for v in self._all]
        return [p.astype(dtype_named(v.dtype)) for p, v in zip(parts, self._all, strict=True)]

    def add(self, row: np.ndarray) -> None:
        """Add what other ranks had counted."""
        for variable, part in self._parts(row):
            mine = variable.numpy()
            variable.assign((mine + part).astype(mine.dtype))

    def _parts(self, row: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        """(variable, its state) of what is in a row."""
        begin = 0
        for variable in self._announced:
            end = begin + int(np.prod(variable.shape))
            yield variable, row[begin:end].reshape(tuple(variable.shape))
            begin = end


def _size(metric: Any) -> int:
    return sum(int(np.prod(v.shape)) for v in metric.variables)


@contextmanager
def survivable_section(world: ElasticWorld) -> Iterator[None]:
    """Inside the block, training survives lost ranks. The launcher is told, as it must end all
    processes when one is lost elsewhere: the others would wait for it, or not notice.

    A rank that leaves the block reports it for all ranks that it has just agreed with: one that is
    lost before it can report is missed all the same. A rank that leaves with an error reports
    nothing: the others may continue without it.
    """
    world.phases += 1
    report_phase(world.phases, [world.stable_rank])
    try:
        yield
    except BaseException:
        world.phases += 1
        raise
    world.phases += 1
    report_phase(world.phases, {member.stable_rank for member in world.members})
