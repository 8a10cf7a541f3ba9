"""Compare the weights of all ranks while training.

Events used: `on_train_begin`, `on_step_end`, `on_epoch_end` and `on_restore`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ktrainer.callbacks.base import Callback
from ktrainer.data.rank_consistency import audit, checksum
from ktrainer.distributed import World
from ktrainer.errors import DivergenceError
from ktrainer.state.durations import Duration, Every
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.named_variables import (
    ATTRIBUTE,
    attribute_variables,
    layer_arrays,
    model_variables,
    named_layers,
    view_of,
)
from ktrainer.steps.variable_placement import placement_of

_NAMED = 5  # of many names in a message


class Audit(Callback):
    """Compare a checksum of every variable between ranks, every so often.

    Of a model in partitions, each partition between its copies. Local layers are left out.

    Ranks whose weights differ train on, and look healthy; this finds out.

    Args:
        every: how often, for example `"1ep"` or `"1000ba"`.
        world: the ranks; default: the trainer's, or this process's.

    Raises:
        DivergenceError: naming the first variable that differs, and the ranks.
    """

    def __init__(self, every: str | Duration = "1ep", world: World | None = None) -> None:
        super().__init__()
        self.every = Every(every)
        self._own_world = world
        self._looks_at_arrays = True
        self._warned: set[str] = set()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.every.steps_per_epoch = self.steps_per_epoch
        self.every.start(self.progress)

    def max_updates_per_call(self) -> int | None:
        return self.every.updates_until_due(self.progress)

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        self._audit_if_due(epoch_end=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._audit_if_due(epoch_end=True)

    def on_restore(self, progress: Progress) -> None:
        self.every.start(progress)

    def _audit_if_due(self, epoch_end: bool) -> None:
        world = self.world
        due = self.every.due(self.progress, epoch_end=epoch_end)
        if world.size == 1:
            return
        if self.every.needs_agreement:
            due = bool(world.broadcast(due, 0, "decision to audit"))
        if due:
            local = local_variables(self.model)
            arrays = {n: view_of(v) for n, v in model_variables(self.model) if id(v) not in local}
            placement = placement_of(self.model)
            if placement is None:
                audit(world, arrays)
                self._warn_of_differing_values(world, local)
            else:
                _audit_copies(world, placement.copies, arrays)

    def _warn_of_differing_values(self, world: World, local: Collection[int]) -> None:
        """Warn, once of each, of values that nothing makes equal: TensorFlow's variables of layers,
        those of losses; and, the first time, arrays that layers have.

        Args:
            local: `id()` of the variables of local layers, whose values are each rank's own.
        """
        own = ((n, v) for n, v in attribute_variables(self.model, False) if not v.of_generator)
        found = [(name.removeprefix(ATTRIBUTE), view_of(v.variable)) for name, v in own]
        if self._looks_at_arrays and not self.model.run_eagerly:
            found += layer_arrays(self.model)
        self._looks_at_arrays = False
        layers = named_layers(self.model) if local else []
        of_rank = {n for layer, n in layers if any(id(v) in local for v in layer.variables)}
        found = [(n, array) for n, array in found if n.partition("/")[0] not in of_rank]
        here = {name: checksum(array) for name, array in found}
        every = world.allgather(here, "audit of values that are no weights")
        common = set.intersection(*map(set, every))  # a rank that has joined looks at more
        differ = {n for n in common if len({each[n] for each in every}) > 1} - self._warned
        self._warned |= differ
        if differ and world.is_root:
            names = sorted(differ)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            warnings.warn(
                f"ranks have different values of {', '.join(names[:_NAMED])}{more}, so training "
                "may differ from that of one process. What a step assigns to a tf.Variable, or to "
                "a variable of a loss, is each rank's own: make it with add_weight(trainable=False)"
                " in a layer, whose values are averaged. Make arrays of a layer from a seed, or "
                "from the same data, on all ranks",
                stacklevel=4,
            )


def _audit_copies(world: World, copies: World, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare a partition's variables between its copies; what differs stops all ranks."""
    found = None
    try:
        audit(copies, arrays)
    except DivergenceError as error:
        found = str(error)
    texts = [text for text in world.allgather(found, "audit of all partitions") if text]
    if texts:
        raise DivergenceError(texts[0])
