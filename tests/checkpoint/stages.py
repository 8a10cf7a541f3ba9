"""A model that real processes hold in stages: for tests of what is saved and put back.

ranks 0 1 2 3, two stages: replica 0 is ranks 0 and 1, replica 1 is ranks 2 and 3
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ktrainer import distributed
from ktrainer.callbacks import Checkpoint
from ktrainer.steps.named_variables import all_variables
from ktrainer.steps.remote_variable import make_remote
from ktrainer.steps.variable_placement import Placement, place, placement_of
from tests.callbacks.helpers import fit


def whole_model(seed: int = 0, epochs: int = 0) -> Any:
    """A small model with slots, statistics, dropout's seed and a layer that is used twice."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((4,))
    tied = keras.layers.Dense(3, name="tied")
    x = tied(keras.layers.Dense(4, name="first")(x))
    x = keras.layers.Dropout(0.3, name="drop")(keras.layers.BatchNormalization(name="norm")(x))
    x = tied(keras.layers.Dense(4, name="back")(x))
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(x), name="net")
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    if epochs:
        fit(model, [], epochs=epochs)
    return model


def stages_of(model: Any, partitions: int) -> dict[int, list[int]]:
    """The stages that hold each variable, by `id`; the first owns it."""
    layers = ["first", "tied", "norm", "drop", "back", "last"]
    stage = {name: i * partitions // len(layers) for i, name in enumerate(layers)}
    held = {}
    for layer in model.layers:
        for variable in layer.variables:
            home = stage[layer.name]
            held[id(variable)] = sorted({home, partitions - 1} if layer.name == "tied" else {home})
    optimizer = model.optimizer
    for slots in (optimizer._momentums, optimizer._velocities):
        for variable, slot in zip(optimizer._trainable_variables, slots, strict=True):
            held[id(slot)] = held[id(variable)]
    for _, variable in all_variables(model):  # step and learning rate
        held.setdefault(id(variable), list(range(partitions)))
    return held


def cut(model: Any, partitions: int) -> Placement:
    """Leave each rank of the world with its stage of `model`; all ranks call it together."""
    here = distributed.current_world()
    replica, partition = divmod(here.rank, partitions)
    first = replica * partitions
    stages = stages_of(model, partitions)
    placement = Placement(
        partition=partition,
        partitions=partitions,
        replica=replica,
        replicas=here.size // partitions,
        held={key for key, where in stages.items() if partition in where},
        owned={key for key, where in stages.items() if partition == where[0]},
        model=here.group(range(first, first + partitions), "the stages of a replica"),
        copies=here.group(range(partition, here.size, partitions), "the copies of a stage"),
    )
    for _, variable in all_variables(model):
        if not placement.holds(variable):
            make_remote(variable, stages[id(variable)][0])
    weights = [w if placement.holds(w) else None for w in model.weights]
    model.get_weights = lambda: [w if w is None else w.numpy() for w in weights]
    place(model, placement)
    return placement


def close(model: Any) -> None:
    """Let go of the groups that `cut` made."""
    placement = placement_of(model)
    if placement is not None:
        placement.model.close()
        placement.copies.close()


def values(model: Any) -> dict[str, np.ndarray]:
    """All variables that this rank holds, and Keras' global seed."""
    from ktrainer.checkpoint.contents.capture_state import named_variables

    placement = placement_of(model)
    return {
        name: np.array(variable.numpy())
        for name, variable in named_variables(model)
        if placement is None or name == "seed/global" or placement.holds(variable)
    }


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bitwise, for all that is in `found`."""
    assert set(found) <= set(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert value.tobytes() == expected[name].tobytes(), name


def keeper(directory: str, model: Any, callbacks: list[Any]) -> Checkpoint:
    """A checkpoint callback in the middle of an epoch."""
    found = Checkpoint(directory, every="1ep", keep=5, callbacks=callbacks)
    found.set_model(model)
    found.on_train_begin()
    found.progress.batch = 2
    return found
