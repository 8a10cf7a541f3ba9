"""What the Trainer offers, under `multi_worker_mirrored` on two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ktrainer.checkpoint.format.checkpoint_folder import make_temporary
from tests.contracts import running
from tests.contracts.running import local
from tests.contracts.test_backends import compare as compare_zoo
from tests.dist.small import small_model
from tests.tf_distribute.running import close, under, zoo_under
from tests.tf_distribute.test_features import trainer, vectors, weights_of

EXACT = ["gan", "averaged_weights", "many_metrics"]
NOISY = ["vae"]
WRITER = "ktrainer.checkpoint.background_writer"


@pytest.mark.exhaustive
def test_models_of_the_zoo(ranks: Callable[..., Any]) -> None:
    """Noise is that of two replicas in one process, each with its own."""
    name = "multi_worker_mirrored"
    by_rank = under(ranks, name, zoo_under, name, 1, [*EXACT, *NOISY], deadline=280)
    (mirrored,) = under(ranks, "mirrored", zoo_under, "mirrored", 2, NOISY, deadline=200)
    for name in [*EXACT, *NOISY]:
        first, second = (rank[name][0] for rank in by_rank)
        assert running.digest(first) == running.digest(second), name
        compare_zoo(name, mirrored[name][0] if name in NOISY else local(name), first)


def further(folder: str, strategy: str, epochs: int, normalised: bool = False) -> Any:
    """Train up to so many epochs, from the checkpoint in `folder` on if there is one.

    Returns the steps, the weights where they are all here, and how many checkpoints this process
    has begun to write.
    """
    import keras

    x, y = vectors(41)
    middle = (keras.layers.BatchNormalization(synchronized=True),) if normalised else ()
    words = {"checkpoint__every": "1ep", "checkpoint__dir": folder, "data__batch_size": 16}
    words |= {"trainer__epochs": epochs}
    with (
        patch(f"{WRITER}.make_temporary", wraps=make_temporary) as begun,
        trainer(strategy, None if strategy == "multi_worker_mirrored" else 2, **words) as it,
    ):
        keras.utils.set_random_seed(epochs)
        model = small_model(extra=middle)
        model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
        it.fit(model, (x, y))
        weights = [] if strategy == "pipeline" else weights_of(model)
        return it.progress.step, weights, begun.call_count


@pytest.mark.exhaustive
def test_checkpoints_go_between_processes_and_one(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Written once, read by all."""
    there, reference = str(tmp_path / "ours"), str(tmp_path / "reference")
    first, _, by_rank = [
        under(ranks, name, further, there, name, epochs, True)
        for epochs, name in enumerate(
            ("multi_worker_mirrored", "local", "multi_worker_mirrored"), 1
        )
    ]
    assert [[rank[2] for rank in each] for each in (first, by_rank)] == [[1, 0], [1, 0]]
    for epochs in (1, 3):
        ((steps, expected, _),) = under(ranks, "local", further, reference, "local", epochs, True)
    for ours in by_rank:
        assert ours[0] == steps == 9
        close(ours[1], expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["data_parallel", "pipeline"])
def test_checkpoints_go_between_strategies_and_other_backends(
    ranks: Callable[..., Any], tmp_path: Path, other: str
) -> None:
    there, reference = str(tmp_path / "ours"), str(tmp_path / "reference")
    for epochs, name in enumerate(("mirrored", other, "mirrored"), 1):
        (steps, ours, _), *_ = under(ranks, name, further, there, name, epochs)
    for epochs in (1, 3):
        ((_, expected, _),) = under(ranks, "local", further, reference, "local", epochs)
    assert steps == 9
    close(ours, expected)
