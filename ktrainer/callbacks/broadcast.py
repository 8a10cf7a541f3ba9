"""All ranks start from one rank's variables.

Events used: `on_train_begin` (arm), `on_epoch_begin` (broadcast, before any step), `on_restore`
(broadcast again).

Horovod's callback broadcasts at the end of the first batch, so its first step trains on
weights that differ; here it happens before the first step, or not at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktrainer.callbacks.base import Callback
from ktrainer.callbacks.variables import model_variables
from ktrainer.errors import DivergenceError, ModelError
from ktrainer.progress import Progress
from ktrainer.world import World
from ktrainer.world.arrays import broadcast_arrays


class BroadcastVariables(Callback):
    """Give every rank the model's and optimizers' variables of rank `root`, before step 1.

    That covers weights, moving statistics, seed generators, optimizer slots, counters and
    learning rates; not metrics, whose states belong to each rank.

    Raises:
        ModelError: several ranks, and a model that has no variables yet.
        DivergenceError: ranks hold different lists of variables; it names the differences.
    """

    def __init__(self, root: int = 0, world: World | None = None) -> None:
        super().__init__()
        self.root = root
        self._own_world = world
        self._pending = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._pending = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self._pending:
            broadcast_model(self.model, self.world, self.root)
            self._pending = False

    def on_restore(self, progress: Progress) -> None:
        broadcast_model(self.model, self.world, self.root)
        self._pending = False


def broadcast_model(model: Any, world: World, root: int = 0) -> None:
    """Broadcast all variables of `model` and of the optimizers that it holds."""
    if world.size == 1:
        return
    if not _has_variables(model):
        raise ModelError(
            f"the model {model.name!r} has no variables yet, so they cannot be made equal on all "
            f"{world.size} ranks before the first step. Give it an Input layer, or call "
            "model.build(input_shape), or call it on one batch before training."
        )
    broadcast_variables(model_variables(model), world, root)


def _has_variables(model: Any) -> bool:
    """Whether all variables exist. A model with a `train_step` of its own may never be called
    itself, and then counts as not built, while its layers are."""
    layers = list(model._flatten_layers(include_self=False))
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def broadcast_variables(named: Sequence[tuple[str, Any]], world: World, root: int = 0) -> None:
    """Set `named` variables to the values of rank `root`, bitwise, in few fused messages."""
    arrays = [np.asarray(variable.numpy()) for _, variable in named]
    _check_same_variables(named, arrays, world)
    received = broadcast_arrays(arrays, world, root, "broadcast of variables")
    if world.rank != root:
        for (_, variable), value in zip(named, received, strict=True):
            variable.assign(value)


def _check_same_variables(
    named: Sequence[tuple[str, Any]], arrays: Sequence[np.ndarray], world: World
) -> None:
    """Compare shapes and dtypes between ranks first: a broadcast of other sizes would corrupt
    or hang. Names may differ: Keras numbers layers by process history."""
    specs = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    digest = zlib.crc32("\n".join(specs).encode())
    both = np.array([digest, -digest], np.int64)
    highest, lowest = world.oob_allreduce(both, "max", "comparison of variables")
    if highest == -lowest:
        return
    here = [f"{name} {spec}" for (name, _), spec in zip(named, specs, strict=True)]
    every = world.allgather(here, "comparison of variables")
    lines = []
    for rank, theirs in enumerate(every[1:], start=1):
        for k in range(max(len(every[0]), len(theirs))):
            ours = every[0][k] if k < len(every[0]) else "(no such variable)"
            other = theirs[k] if k < len(theirs) else "(no such variable)"
            if ours.split(" ")[-1] != other.split(" ")[-1]:
                lines.append(f"variable {k}: rank 0 has {ours}, rank {rank} has {other}")
                break
    raise DivergenceError(
        "ranks hold different variables, so they cannot be broadcast: "
        + "; ".join(lines)
        + ". Build the same model, and its optimizers, on every rank."
    )
