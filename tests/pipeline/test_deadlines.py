"""Whatever a stage waits for, it does so until the deadline, and then names who owes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ktrainer.errors import DeadlineExceeded

SECONDS = 20.0  # how long the late rank waits for the others' complaint


def _late(rank: int, model: str, rows: int, where: tuple[str, str], folder: str) -> None:
    """Train with a rank that, from the second step on, does not do `where` until told."""
    from importlib import import_module

    import keras

    from ktrainer import Trainer
    from tests.pipeline.equal import configure, dataset, pipeline
    from tests.pipeline.trained import BUILD, data_of

    configure("float32")
    told = Path(folder) / "told"
    module, path = where
    *owners, name = path.split(".")
    owner = import_module(f"ktrainer.{module}")
    for each in owners:
        owner = getattr(owner, each)
    original = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + SECONDS
        while trainer.world.rank == rank and trainer.progress.step and not told.exists():
            assert time.monotonic() < end, "no rank reported it"
            time.sleep(0.01)
        return original(*args, **kwargs)

    class Deadline(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            trainer.world.deadline = 4.0  # the first batch compiled

    words = [*pipeline(2, "backend.microbatches=2"), "logging.progress=none", "logging.csv=false"]
    with (
        patch.object(owner, name, late),
        Trainer(overrides=words, callbacks=[Deadline()]) as trainer,
    ):
        try:
            trainer.fit(BUILD[model], dataset(data_of(model, rows), rows, 20))
        except DeadlineExceeded:
            told.touch()
            raise


@pytest.mark.quick("shapes")
@pytest.mark.parametrize(
    ("size", "rank", "model", "rows", "where", "what"),
    [
        (
            2,
            1,
            "plain",
            38,  # the second batch has microbatches of another size
            ("backends.pipeline.runtime.transport", "Transport.send_object"),
            "what the loss depends on",
        ),
        (
            2,
            1,
            "masked",
            40,  # the second batch compiles nothing
            ("backends.pipeline.runtime.tied_gradients", "TiedGradients._send"),
            "embeddings from",
        ),
        (
            4,
            2,
            "plain",
            40,
            ("distributed.mpi_gradients", "MpiGradients.reduce_in_place"),
            "all-reduce of gradients",
        ),
    ],
    ids=["shapes", "tied", "replicas"],
)
def test_a_rank_that_is_late_is_named(
    ranks: Callable[..., Any],
    tmp_path: Path,
    size: int,
    rank: int,
    model: str,
    rows: int,
    where: tuple[str, str],
    what: str,
) -> None:
    outcomes = ranks(size).outcomes(_late, rank, model, rows, where, str(tmp_path))
    # Others wait for the late rank too, elsewhere in the step: the first to complain tells it.
    complaints = [o.error for o in outcomes if f"No answer from rank {rank}:" in str(o.error)]
    assert complaints, outcomes
    for error in complaints:
        assert isinstance(error, DeadlineExceeded)
        assert error.seconds == 4
        assert what in str(error)
