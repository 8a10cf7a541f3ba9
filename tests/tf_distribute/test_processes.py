"""What the Trainer offers, under `multi_worker_mirrored` on two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ktrainer.checkpoint.format import begin
from tests.contracts import running
from tests.contracts.running import local
from tests.contracts.test_backends import compare as compare_zoo
from tests.dist.harness import leaks
from tests.dist.small import more, small_model
from tests.tf_distribute.running import CLUSTER, ONE_PROCESS, zoo_under
from tests.tf_distribute.test_features import half_precision, trainer, vectors, weights_of

EXACT = ["many_metrics", "gan", "averaged_weights", "masked_lstm", "own_loss_and_metrics"]
EXACT += ["own_logs", "nested_logs"]
NOISY = ["batch_norm_cnn", "vae"]


def on_a_rank(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    finally:
        leaks.expect_ports()


@pytest.mark.parametrize(("exact", "noisy"), [(EXACT[:2], NOISY[:1]), more(EXACT[2:], NOISY[1:])])
def test_models_of_the_zoo(ranks: Callable[..., Any], exact: list[str], noisy: list[str]) -> None:
    """Noise is that of two replicas in one process, each with its own."""
    by_rank = ranks(2, f"{CLUSTER} 1").run(
        on_a_rank, zoo_under, "multi_worker_mirrored", 1, [*exact, *noisy], deadline=250
    )
    (mirrored,) = ranks(1, ONE_PROCESS).run(zoo_under, "mirrored", 2, noisy, deadline=200)
    for name in [*exact, *noisy]:
        first, second = (rank[name][0] for rank in by_rank)
        assert running.digest(first) == running.digest(second), name
        compare_zoo(name, mirrored[name][0] if name in noisy else local(name), first)


def test_mixed_bfloat16(ranks: Callable[..., Any]) -> None:
    words = ("multi_worker_mirrored", "mixed_bfloat16", None)
    by_rank = ranks(2, f"{CLUSTER} 1").run(on_a_rank, half_precision, *words, deadline=120)
    (reference,) = ranks(1, ONE_PROCESS).run(half_precision, "local", *words[1:])
    for ours in by_rank:
        for mine, value in zip(ours[0], reference[0], strict=True):
            np.testing.assert_allclose(mine, value, rtol=0, atol=4e-3)  # 8 bits


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
        patch("ktrainer.checkpoint.saver.begin", wraps=begin) as begun,
        trainer(strategy, None if strategy == "multi_worker_mirrored" else 2, **words) as it,
    ):
        keras.utils.set_random_seed(epochs)
        model = small_model(extra=middle)
        model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
        it.fit(model, (x, y))
        weights = [] if strategy == "pipeline" else weights_of(model)
        return it.progress.step, weights, begun.call_count


def test_checkpoints_go_between_processes_and_one(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Written once, read by all."""
    several, one = ranks(2, f"{CLUSTER} 1"), ranks(1, ONE_PROCESS)
    there, reference = str(tmp_path / "ours"), str(tmp_path / "reference")
    words = (there, "multi_worker_mirrored")
    first = several.run(on_a_rank, further, *words, 1, True, deadline=120)
    one.run(further, there, "local", 2, True)
    by_rank = several.run(on_a_rank, further, *words, 3, True, deadline=120)
    assert [[rank[2] for rank in each] for each in (first, by_rank)] == [[1, 0], [1, 0]]
    for epochs in (1, 2, 3):
        ((steps, expected, _),) = one.run(further, reference, "local", epochs, True)
    for ours in by_rank:
        assert ours[0] == steps == 9
        for mine, value in zip(ours[1], expected, strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", ["data_parallel", "pipeline"])
def test_checkpoints_go_between_strategies_and_other_backends(
    ranks: Callable[..., Any], tmp_path: Path, other: str
) -> None:
    several, one = ranks(2), ranks(1, ONE_PROCESS)
    there, reference = str(tmp_path / "ours"), str(tmp_path / "reference")
    for epochs in (1, 3):
        several.run(further, there, other, epochs, deadline=60)
        ((steps, ours, _),) = one.run(further, there, "mirrored", epochs + 1)
    for epochs in (1, 2, 3, 4):
        ((_, expected, _),) = one.run(further, reference, "local", epochs)
    assert steps == 12
    for mine, value in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5)
