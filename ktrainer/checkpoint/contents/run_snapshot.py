"""Copy the state of a run to host memory, to write a checkpoint from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.capture_state import capture, history_of, names_to_save
from ktrainer.checkpoint.contents.data_state import Data
from ktrainer.checkpoint.format.checkpoint_folder import MODEL, MOST_BYTES
from ktrainer.checkpoint.format.value_encoding import encode_json
from ktrainer.distributed import World
from ktrainer.errors import CheckpointError
from ktrainer.runtime.monkeypatching import Replacements
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Progress
from ktrainer.steps.named_variables import lookup_layers
from ktrainer.steps.variable_placement import placement_of


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, which training no longer changes.

    Attributes:
        step: updates done.
        arrays: the arrays that this rank writes, by name.
        state: the rest, as JSON.
        names: names of the arrays of all ranks, in order; on other ranks than 0, of its own.
        facts: more entries of the manifest.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    state: bytes
    names: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def take_snapshot(
    model: Any,
    progress: Progress,
    world: World,
    callbacks: Iterable[Any],
    history: dict[str, Any] | None = None,
    feed: Data | None = None,
    place: Mapping[str, Any] | None = None,
    counted: MetricCounts | None = None,
) -> Snapshot:
    """Copy the state of a run to host memory. All ranks call it together.

    Args:
        progress: the position to resume from.
        history: History so far; default: the model's.
        feed: the data whose iterators' states are saved.
        place: the data fingerprint; None without a trainer.
        counted: metric counts of this rank; None without a trainer.

    Raises:
        CheckpointError: the state of a callback is not JSON.
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
    text = encode_state(state)
    names = names_to_save(model, arrays, state) if world.is_root else list(arrays)
    return Snapshot(progress.step, arrays, text, names, _facts(model, progress, world))


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The text of `state.json`.

    Raises:
        CheckpointError: the state of a callback is not JSON.
    """
    try:
        return encode_json(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state of the run cannot be saved in a checkpoint: {error}. The `state_dict` of a "
            "callback must hold numbers, strings, lists, dicts or arrays."
        ) from error


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
    """`{"model.json": text}`, from which Keras can build the model; empty if it cannot. Without
    vocabularies where they cannot be described."""
    for described in (_vocabularies_described(model), _vocabularies_left_out(model)):
        try:
            with warnings.catch_warnings(), described:
                warnings.simplefilter("ignore")
                text = model.to_json().encode()
        except Exception:  # a user's class whose `get_config` fails, or is missing
            continue
        if len(text) <= MOST_BYTES[MODEL]:
            return {MODEL: text}
    return {}


@contextmanager
def _vocabularies_described(model: Any) -> Iterator[None]:
    """Have lookup layers describe the vocabulary of now inside the block. Keras describes the one
    that the layer was made with, and writes others, of `adapt` for example, to files."""
    with Replacements() as replacing:
        for layer, _ in lookup_layers(model):
            if not layer.get_vocabulary(include_special_tokens=False):
                continue
            words = layer.get_vocabulary()
            replacing.set(layer, "input_vocabulary", words)
            if layer.output_mode == "tf_idf":  # padded, which Keras does again
                weights = layer.idf_weights_const.numpy()[: len(words)]
                replacing.set(layer, "input_idf_weights", weights)
        yield


@contextmanager
def _vocabularies_left_out(model: Any) -> Iterator[None]:
    """Have lookup layers describe no vocabulary inside the block: no other one than that of now."""
    with Replacements() as replacing:
        for layer, _ in lookup_layers(model):
            replacing.set(layer, "input_vocabulary", None)
            replacing.set(layer, "input_idf_weights", None)
        yield
