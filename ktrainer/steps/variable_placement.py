"""The place of a model's variables, when processes do not all hold the same ones.

Under a pipeline every process has the whole model as Python objects, in which a variable of
another stage has a shape, a name and no value: reading it is an error that says where it is.
Whoever reads all variables of a model asks `placement_of(model)` first; None is the usual case,
in which every process holds everything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ktrainer.distributed.world import World


@dataclass(frozen=True, eq=False)
class Placement:
    """The part that this process holds of a model that is cut into partitions.

    Attributes:
        partition, partitions: this process's part of the model, and how many there are.
        replica, replicas: which copy of the whole model it belongs to, and how many there are.
        held: `id()` of the variables whose values are here, those of the optimizers included.
        owned: those of them that this partition saves and counts: of a variable that several
            partitions hold, such as tied weights or an optimizer's step, only the first has it.
        model: the processes of this replica, in the order of partitions.
        copies: the processes that hold this partition, in the order of replicas.
    """

    partition: int
    partitions: int
    replica: int
    replicas: int
    held: Collection[int]
    owned: Collection[int]
    model: World
    copies: World

    def holds(self, variable: Any) -> bool:
        """Return whether the value of `variable` is in this process."""
        return id(variable) in self.held

    def owns(self, variable: Any) -> bool:
        """Return whether this partition is the one that saves `variable`."""
        return id(variable) in self.owned

    @property
    def is_last(self) -> bool:
        """Return whether losses, metrics and outputs are computed here."""
        return self.partition == self.partitions - 1


_placements: WeakKeyDictionary[Any, Placement] = WeakKeyDictionary()


def place(model: Any, placement: Placement) -> None:
    """Note where the variables of `model` are."""
    _placements[model] = placement


def placement_of(model: Any) -> Placement | None:
    """The placement of the variables of `model`; None: all of them are in every process."""
    return _placements.get(model)


def remove_placement(model: Any) -> None:
    """Note that all variables of `model` are in every process again."""
    _placements.pop(model, None)


def finalize_normalization(model: keras.Model) -> None:
    """Let `Normalization` layers compute with the present values of their variables, of which they
    keep copies: call it after these were assigned."""
    placement = placement_of(model)
    for layer in model._flatten_layers():
        here = all(placement is None or placement.holds(v) for v in layer.variables)
        if here and isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
