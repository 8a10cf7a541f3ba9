"""A run between two steps, copied to host memory: what a checkpoint is written from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktrainer.checkpoint.data_state import Data
from ktrainer.checkpoint.encoding import encode_json
from ktrainer.checkpoint.format import MODEL, MOST_BYTES
from ktrainer.checkpoint.state import capture, history_of, names_to_save
from ktrainer.counted import Counted
from ktrainer.errors import CheckpointError
from ktrainer.progress import Progress
from ktrainer.steps.placement import placement_of
from ktrainer.world import World


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of; training does not change it any more.

    Attributes:
        step: updates done.
        arrays: those that this rank writes, by name.
        state: whatever else, as JSON.
        names: of the arrays of all ranks, in their order; of this rank's, where it is not 0.
        facts: more for the manifest.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    state: bytes
    names: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def take(
    model: Any,
    progress: Progress,
    world: World,
    callbacks: Iterable[Any],
    history: dict[str, Any] | None = None,
    feed: Data | None = None,
    place: Mapping[str, Any] | None = None,
    counted: Counted | None = None,
) -> Snapshot:
    """Copy the state of a run to host memory. All ranks call it together.

    Args:
        progress: where to go on.
        history: History so far; default: the model's.
        feed: the data, whose iterators' states are kept.
        place: what the position in the data depends on; None: nobody counts it.
        counted: what this rank has counted of the epoch; None: nobody counts.

    Raises:
        CheckpointError: what a callback wants to keep is not JSON.
    """
    history = history if history is not None else history_of(model)
    arrays, state = capture(
        model,
        progress,
        world,
        callbacks=callbacks,
        history=history,
        feed=feed,
        place=place,
        counted=counted,
    )
    try:
        text = encode_json(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the run cannot be kept in a checkpoint: {error}. What a callback's "
            "`state_dict` returns must be numbers, strings, lists, dicts or arrays."
        ) from error
    names = names_to_save(model, arrays, state) if world.is_root else list(arrays)
    return Snapshot(progress.step, arrays, text, names, _facts(model, progress, world))


def _facts(model: Any, progress: Progress, world: World) -> dict[str, Any]:
    placement = placement_of(model)
    return {
        "epoch": progress.epoch,
        "batch": progress.batch,
        "world_size": world.size,
        "replicas": placement.replicas if placement else world.replicas,
        "partitions": placement.partitions if placement else 1,
    }


def model_text(model: Any) -> dict[str, bytes]:
    """`{"model.json": text}`, from which Keras can make the model; empty if it cannot say how."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = model.to_json().encode()
    except Exception:  # a class of the user's whose `get_config` does not work, or is missing
        return {}
    return {MODEL: text} if len(text) <= MOST_BYTES[MODEL] else {}
