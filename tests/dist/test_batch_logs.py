"""Logs that callbacks get after each batch: with `logging.batch_logs=all` those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from tests.contracts.running import ROWS, SEED, config, use_float64, with_ktrainer
from tests.contracts.zoo import ZOO
from tests.dist.harness import leaks
from tests.tf_distribute.running import CLUSTER

DATA_PARALLEL = {"name": "data_parallel", "engine": "mpi"}
MULTI_WORKER = {"name": "tf_distribute", "strategy": "multi_worker_mirrored", "devices": 1}
PIPELINE = {"name": "pipeline", "partitions": 2, "microbatches": 2}
HYBRID = {"name": "pipeline", "partitions": 1, "microbatches": 2}


class Heard(keras.callbacks.Callback):
    """Notes the logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[str, int, dict[str, Any]]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(("train", batch, dict(logs)))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(("test", batch, dict(logs)))


def heard(
    names: list[str], backend: dict[str, Any], which: str = "all", steps_per_call: int = 1
) -> list[list[tuple[str, int, dict[str, Any]]]]:
    use_float64()
    found = []
    try:
        for name in names:
            callback = Heard()
            progress = {"progress": "none", "csv": False, "batch_logs": which}
            trainer = {"epochs": 2, "steps_per_call": steps_per_call}
            with_ktrainer(
                ZOO[name], callbacks=[callback], backend=backend, logging=progress, trainer=trainer
            )
            found.append(callback.logs)
        return found
    finally:
        leaks.expect_ports() if "strategy" in backend else None


def same(ours: Any, truth: Any) -> None:
    for mine, expected in zip(ours, truth, strict=True):
        assert [entry[:2] for entry in mine] == [entry[:2] for entry in expected]
        for (kind, batch, logs), (_, _, values) in zip(mine, expected, strict=True):
            assert logs.keys() == values.keys()
            for key, value in values.items():
                text = f"{kind} {batch} {key}"
                np.testing.assert_allclose(logs[key], value, rtol=1e-9, err_msg=text)


def heard_in_evaluate(backend: dict[str, Any], which: str) -> list[tuple[str, int, dict[str, Any]]]:
    use_float64()
    case, callback = ZOO["many_metrics"], Heard()
    logging = {"progress": "none", "csv": False, "batch_logs": which}
    with Trainer(config(backend=backend, logging=logging)) as trainer:
        keras.utils.set_random_seed(SEED)
        trainer.evaluate(case.build(), case.data(ROWS), callbacks=callback)
    return callback.logs


@pytest.mark.exhaustive
def test_callbacks_of_an_evaluation(ranks: Callable[..., Any]) -> None:
    truth = heard_in_evaluate({"name": "local"}, "rank")
    assert len(truth) == 3
    for ours in ranks(2).run(heard_in_evaluate, DATA_PARALLEL, "all"):
        same([ours], [truth])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "names", "steps_per_call"),
    [
        (DATA_PARALLEL, ["own_logs", "nested_logs"], 1),
        (DATA_PARALLEL, ["sample_weights"], 2),
        (MULTI_WORKER, ["nested_logs"], 1),
        (PIPELINE, ["sample_weights"], 1),
        (HYBRID, ["sample_weights"], 1),
    ],
    ids=str,
)
def test_all_ranks_hear_what_one_process_would(
    ranks: Callable[..., Any], backend: dict[str, Any], names: list[str], steps_per_call: int
) -> None:
    """The last batches have one row: one rank has nothing to do there."""
    group = ranks(2, f"{CLUSTER} 1" if backend is MULTI_WORKER else "")
    truth = heard(names, {"name": "local"}, "rank", steps_per_call)
    for ours in group.run(heard, names, backend, "all", steps_per_call, deadline=200):
        same(ours, truth)


@pytest.mark.exhaustive
def test_each_rank_hears_its_own_by_default(ranks: Callable[..., Any]) -> None:
    one, two = ranks(2).run(heard, ["mlp"], DATA_PARALLEL, "rank")
    pairs = zip(one[0], two[0], strict=True)
    assert all(a[2]["loss"] != b[2]["loss"] for a, b in pairs)
