"""Every synchronous strategy gives the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import largest_difference, local, use_float64, with_ktrainer
from tests.contracts.test_backends import LOGS, WEIGHTS
from tests.contracts.test_backends import compare as compare_zoo
from tests.contracts.zoo import ZOO
from tests.dist import cases
from tests.dist.cases import CASES, Outcome, difference
from tests.dist.harness import leaks
from tests.dist.small import make_trainer, more, small_model
from tests.dist.test_same_numbers import _train_uneven
from tests.tf_distribute.running import (
    CLUSTER,
    ONE_PROCESS,
    cases_under,
    expected,
    make_devices,
    zoo_under,
)

NAMES = list(CASES)
ALL = [(case, "sgd" if i % 2 else "adamw") for i, case in enumerate(NAMES)] + [("plain", "sgd")]
ALL.remove(("masked", "adamw"))  # masked_accumulated has all of it
SOME = [
    ("plain", "adamw"),
    ("accumulated", "sgd"),
    ("clipped_by_optimizer", "adamw"),
    ("synchronized_batch_norm", "sgd"),
    ("several_outputs", "adamw"),
]
FEW = [("plain", "sgd"), ("plain", "adamw"), ("sample_weights", "sgd"), ("regularised", "adamw")]
MIRRORED = ["gan", "own_logs", "many_metrics", "regularised", "averaged_weights", "masked_lstm"]
MIRRORED += ["nested_logs"]

# With MIRRORED all kinds of metrics, gradients and optimizers; ALL has the other models' parts.
CENTRAL = ["skip_connections", "many_metrics", "own_loss_and_metrics", "two_inputs_two_outputs"]
CENTRAL += ["gan", "own_logs", "nested_logs", "averaged_weights", "masked_lstm"]


def compare(
    ours: list[Outcome], chosen: list[tuple[str, str]], floatx: str = "float64", **settings: Any
) -> None:
    """Weights, slots, logs and evaluation are those of one process."""
    close, logs = (1e-10, 1e-9) if floatx == "float64" else (1e-5, 1e-4)
    largest = {}
    for (case, optimizer), outcome in zip(chosen, ours, strict=True):
        reference = expected(case, optimizer, floatx, **settings)
        largest[f"{case}/{optimizer}"] = difference(reference, outcome)
        assert list(outcome.history) == list(reference.history), case
        for key, values in reference.history.items():
            np.testing.assert_allclose(outcome.history[key], values, rtol=logs, err_msg=case)
        for key, value in reference.evaluated.items():
            np.testing.assert_allclose(outcome.evaluated[key], value, rtol=logs, err_msg=case)
    print({key: f"{value:.1e}" for key, value in largest.items()})
    assert max(largest.values()) <= close, largest


@pytest.mark.parametrize(
    ("strategy", "devices", "chosen"),
    [
        ("mirrored", 2, ALL),
        ("mirrored", 4, SOME),
        ("central_storage", 2, SOME),
        more("central_storage", 2, ALL),
        ("one_device", 1, FEW),
        ("default", None, FEW[:2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cases_in_one_process(
    ranks: Callable[..., Any], strategy: str, devices: int | None, chosen: list[tuple[str, str]]
) -> None:
    (ours,) = ranks(1, ONE_PROCESS).run(
        cases_under, strategy, devices, chosen, "float64", deadline=280
    )
    compare(ours, chosen)


@pytest.mark.parametrize(
    ("strategy", "devices", "names"),
    [("mirrored", 2, MIRRORED), more("central_storage", 2, CENTRAL)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_the_zoo(
    ranks: Callable[..., Any], strategy: str, devices: int, names: list[str]
) -> None:
    (ours,) = ranks(1, ONE_PROCESS).run(zoo_under, strategy, devices, names, deadline=280)
    for name in names:
        compare_zoo(name, local(name), ours[name][0])
        slots, variable = largest_difference(ours[name][0].slots, local(name).slots)
        assert slots <= WEIGHTS, f"{name}: {variable} differs by {slots:.1e}"
        for mine, value in zip(ours[name][0].metrics, local(name).metrics, strict=True):
            np.testing.assert_allclose(mine, value, rtol=LOGS, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("size", "devices", "chosen"),
    [
        (2, 1, [*FEW[1:3], ("masked_accumulated", "adamw")]),
        (3, 1, FEW[:1]),
        (2, 2, [("synchronized_batch_norm", "sgd")]),
        more(2, 1, [*FEW[::3], ("several_outputs", "sgd")]),
        more(3, 1, FEW[1:2]),
        more(2, 2, FEW[1:2]),
    ],
)
def test_cases_in_several_processes(
    ranks: Callable[..., Any], size: int, devices: int, chosen: list[tuple[str, str]]
) -> None:
    group = ranks(size, f"{CLUSTER} {devices}")
    by_rank = group.run(
        cases_under, "multi_worker_mirrored", devices, chosen, "float64", deadline=280
    )
    for ours in by_rank:
        assert [each.checksum for each in ours] == [each.checksum for each in by_rank[0]]
        compare(ours, chosen)


def normalised_in_parts(strategy: str, devices: int, floatx: str = "float64") -> Outcome:
    """Synchronized statistics, of updates from two batches each."""
    if strategy != "local":  # which is the tests' own process
        make_devices()
    case = cases.synchronized_batch_norm("sgd")
    case.settings = {"trainer.accumulate": 2, "data.batch_size": cases.BATCH // 2}
    words: dict[str, Any] = {"backend": "local"}
    if strategy != "local":
        words = {"backend": "tf_distribute", "backend__strategy": strategy}
        words |= {"backend__devices": devices}
    return cases.train(case, floatx=floatx, **words)


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_statistics_of_accumulated_batches(ranks: Callable[..., Any], strategy: str) -> None:
    reference = normalised_in_parts("local", 1)
    (ours,) = ranks(1, ONE_PROCESS).run(normalised_in_parts, strategy, 2)
    assert difference(reference, ours) <= 1e-10


def uneven_in_one_call(**settings: Any) -> Outcome:
    """Batches of 32, 32 and 31: the ranks' parts differ, so not all can stack them."""
    try:
        return _train_uneven(trainer__steps_per_call=3, **settings)
    finally:
        leaks.expect_ports()


def test_several_steps_a_call_of_which_one_rank_has_fewer_rows(ranks: Callable[..., Any]) -> None:
    reference = uneven_in_one_call(backend="local")
    words = {"backend": "tf_distribute", "backend__strategy": "multi_worker_mirrored"}
    ours = ranks(2, f"{CLUSTER} 1").run(
        uneven_in_one_call, backend__devices=1, world__deadline=30, deadline=120, **words
    )
    for outcome in ours:
        assert difference(reference, outcome) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "size", "settings"),
    [
        ("mirrored", 1, {"trainer__steps_per_call": 3}),
        ("central_storage", 1, {"trainer__steps_per_call": 3}),
        ("mirrored", 1, {"trainer__xla": "true"}),
        more("one_device", 1, {"trainer__xla": "true"}),
        more("multi_worker_mirrored", 2, {"trainer__xla": "true"}),
        ("mirrored", 1, {"backend__cross_device_ops": "hierarchical_copy"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_do_not_change_the_numbers(
    ranks: Callable[..., Any], strategy: str, size: int, settings: Any
) -> None:
    few = {"trainer__epochs": 2}
    # The second has sparse gradients, and a loss whose denominator is counted over all replicas.
    chosen = (
        [("plain", "sgd"), ("masked_embedding", "adamw")] if "trainer__xla" in settings else FEW[:1]
    )
    group = ranks(size, ONE_PROCESS if size == 1 else f"{CLUSTER} 1")
    devices = 2 if strategy in ("mirrored", "central_storage") else 1
    for ours in group.run(
        cases_under, strategy, devices, chosen, "float64", deadline=200, **settings, **few
    ):
        compare(ours, chosen, **few)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [("mirrored", 1), more("central_storage", 1), more("multi_worker_mirrored", 2)],
)
def test_float32_to_round_off(ranks: Callable[..., Any], strategy: str, size: int) -> None:
    chosen = [("plain", "sgd"), ("clipped_by_config", "adamw")]
    group = ranks(size, ONE_PROCESS if size == 1 else f"{CLUSTER} 1")
    devices = 2 if size == 1 else 1
    for ours in group.run(cases_under, strategy, devices, chosen, "float32", deadline=150):
        compare(ours, chosen, "float32")


def test_a_ring_with_small_packs(ranks: Callable[..., Any]) -> None:
    chosen = [("plain", "adamw")]
    words = {"backend__communication": "ring", "backend__bytes_per_pack": 256}
    by_rank = ranks(2, f"{CLUSTER} 1").run(
        cases_under, "multi_worker_mirrored", 1, chosen, "float64", deadline=150, **words
    )
    for ours in by_rank:
        compare(ours, chosen)


def outputs_of(backend: str, **settings: Any) -> Any:
    """What a model gives for rows that no number of processes divides."""
    import keras

    try:
        keras.utils.set_random_seed(1)
        words = {"backend": backend, "data__batch_size": 32, **settings}
        with make_trainer(**words) as trainer:
            return trainer.predict(small_model(), cases.vectors()[0])
    finally:
        if backend != "local":
            leaks.expect_ports()


def test_predictions_of_several_processes(ranks: Callable[..., Any]) -> None:
    reference = outputs_of("local")
    words = {"backend__strategy": "multi_worker_mirrored", "backend__devices": 1}
    for ours in ranks(2, f"{CLUSTER} 1").run(outputs_of, "tf_distribute", deadline=100, **words):
        assert ours.shape == (cases.EXAMPLES, 3)
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def nested_logs(backend: dict[str, Any], settings: dict[str, Any]) -> Any:
    use_float64()
    return with_ktrainer(ZOO["nested_logs"], backend=backend, **settings)


@pytest.mark.parametrize(
    "settings", [{"trainer": {"accumulate": 2, "epochs": 2}}, {"health": {"nan": "skip"}}], ids=str
)
def test_nested_logs_of_updates_in_parts_or_guarded(
    ranks: Callable[..., Any], settings: dict[str, Any]
) -> None:
    group = ranks(1, ONE_PROCESS)
    mirrored = {"name": "tf_distribute", "strategy": "mirrored", "devices": 2}
    (ours,) = group.run(nested_logs, mirrored, settings)
    (reference,) = group.run(nested_logs, {"name": "local"}, settings)
    compare_zoo("nested_logs", reference, ours)
