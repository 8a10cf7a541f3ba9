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
from tests.dist.small import make_trainer, small_model
from tests.dist.test_same_numbers import _train_uneven
from tests.tf_distribute.running import cases_under, expected, make_devices, under, zoo_under

WORKERS = "multi_worker_mirrored"

# Without those of which a case that also accumulates has all.
NAMES = [name for name in CASES if name not in ("masked", "accumulated", "positions")]
ALL = cases.with_optimizers(NAMES)
SOME = [
    ("synchronized_batch_norm", "sgd"),
    ("clipped_by_optimizer", "adamw"),
    ("masked_accumulated", "sgd"),
    ("several_outputs", "adamw"),
]
PLAIN = [("plain", "sgd")]
MIRRORED = ["gan", "own_logs", "many_metrics", "averaged_weights", "masked_lstm"]

# With MIRRORED all kinds of metrics, gradients and optimizers; ALL has the other models' parts.
CENTRAL = ["skip_connections", "own_loss_and_metrics", "gan", "averaged_weights"]


def compare(
    ours: list[Outcome], chosen: list[tuple[str, str]], floatx: str = "float64", **settings: Any
) -> None:
    """Weights, slots, logs and evaluation are those of one process."""
    close, logs = (1e-10, 1e-9) if floatx == "float64" else (1e-5, 1e-4)
    references = [expected(case, optimizer, floatx, **settings) for case, optimizer in chosen]
    cases.compare(references, [ours], chosen, close, logs)


@pytest.mark.quick("mirrored--1")
@pytest.mark.parametrize(
    ("strategy", "devices", "chosen"),
    [
        ("mirrored", 2, ALL),
        ("mirrored", 4, SOME[:2]),
        ("central_storage", 2, [*PLAIN, *SOME]),
        ("one_device", 1, [("sample_weights", "sgd")]),
        ("default", None, [("plain", "adamw")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cases_in_one_process(
    ranks: Callable[..., Any], strategy: str, devices: int | None, chosen: list[tuple[str, str]]
) -> None:
    words = (strategy, devices, chosen, "float64")
    (ours,) = under(ranks, strategy, cases_under, *words, deadline=280)
    compare(ours, chosen)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "devices", "names"),
    [("mirrored", 2, MIRRORED), ("central_storage", 2, CENTRAL)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_the_zoo(
    ranks: Callable[..., Any], strategy: str, devices: int, names: list[str]
) -> None:
    (ours,) = under(ranks, strategy, zoo_under, strategy, devices, names, deadline=280)
    for name in names:
        compare_zoo(name, local(name), ours[name][0])
        slots, variable = largest_difference(ours[name][0].slots, local(name).slots)
        assert slots <= WEIGHTS, f"{name}: {variable} differs by {slots:.1e}"
        for mine, value in zip(ours[name][0].metrics, local(name).metrics, strict=True):
            np.testing.assert_allclose(mine, value, rtol=LOGS, atol=1e-12, err_msg=name)


@pytest.mark.quick("2-2-chosen2")
@pytest.mark.parametrize(
    ("size", "devices", "chosen"),
    [
        (2, 1, [("sample_weights", "sgd"), ("masked_accumulated", "adamw")]),
        (3, 1, PLAIN),
        (2, 2, [("synchronized_batch_norm", "sgd")]),
    ],
)
def test_cases_in_several_processes(
    ranks: Callable[..., Any], size: int, devices: int, chosen: list[tuple[str, str]]
) -> None:
    words = (WORKERS, cases_under, WORKERS, devices, chosen, "float64")
    by_rank = under(ranks, *words, size=size, devices=devices, deadline=280)
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


@pytest.mark.exhaustive
def test_statistics_of_accumulated_batches(ranks: Callable[..., Any]) -> None:
    reference = normalised_in_parts("local", 1)
    (ours,) = under(ranks, "mirrored", normalised_in_parts, "mirrored", 2)
    assert difference(reference, ours) <= 1e-10


def uneven_in_one_call(**settings: Any) -> Outcome:
    """Batches of 32, 32 and 31: the ranks' parts differ, so not all can stack them."""
    return _train_uneven(trainer__steps_per_call=3, **settings)


@pytest.mark.exhaustive
def test_several_steps_a_call_of_which_one_rank_has_fewer_rows(ranks: Callable[..., Any]) -> None:
    reference = uneven_in_one_call(backend="local")
    words = {"backend": "tf_distribute", "backend__strategy": WORKERS, "backend__devices": 1}
    for outcome in under(ranks, WORKERS, uneven_in_one_call, world__deadline=30, **words):
        assert difference(reference, outcome) <= 1e-10


@pytest.mark.quick("mirrored-backend__cross_device_ops")
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("mirrored", {"trainer__steps_per_call": 3}),
        ("mirrored", {"trainer__xla": "true"}),
        (WORKERS, {"trainer__xla": "true"}),
        ("mirrored", {"backend__cross_device_ops": "hierarchical_copy"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_options_do_not_change_the_numbers(
    ranks: Callable[..., Any], strategy: str, settings: Any
) -> None:
    few = {"trainer__epochs": 2}
    # The second has sparse gradients, and a loss whose denominator is counted over all replicas.
    chosen = [("plain", "sgd"), ("masked", "adamw")] if "trainer__xla" in settings else PLAIN
    devices = 1 if strategy == WORKERS else 2
    words = (strategy, cases_under, strategy, devices, chosen, "float64")
    for ours in under(ranks, *words, deadline=200, **settings, **few):
        compare(ours, chosen, **few)


@pytest.mark.exhaustive
def test_float32_to_round_off(ranks: Callable[..., Any]) -> None:
    chosen = [("clipped_by_config", "adamw")]
    words = (WORKERS, 1, chosen, "float32")
    for ours in under(ranks, WORKERS, cases_under, *words, deadline=150):
        compare(ours, chosen, "float32")


@pytest.mark.exhaustive
def test_a_ring_with_small_packs(ranks: Callable[..., Any]) -> None:
    chosen = [("plain", "adamw")]
    words = {"backend__communication": "ring", "backend__bytes_per_pack": 256}
    case = (WORKERS, cases_under, WORKERS, 1, chosen, "float64")
    for ours in under(ranks, *case, deadline=150, **words):
        compare(ours, chosen)


def outputs_of(backend: str, **settings: Any) -> Any:
    """What a model gives for rows that no number of processes divides."""
    import keras

    keras.utils.set_random_seed(1)
    words = {"backend": backend, "data__batch_size": 32, **settings}
    with make_trainer(**words) as trainer:
        return trainer.predict(small_model(), cases.vectors()[0])


@pytest.mark.exhaustive
def test_predictions_of_several_processes(ranks: Callable[..., Any]) -> None:
    reference = outputs_of("local")
    words = {"backend__strategy": WORKERS, "backend__devices": 1}
    for ours in under(ranks, WORKERS, outputs_of, "tf_distribute", **words):
        assert ours.shape == (cases.EXAMPLES, 3)
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def nested_logs(backend: dict[str, Any], settings: dict[str, Any]) -> Any:
    use_float64()
    return with_ktrainer(ZOO["nested_logs"], backend=backend, **settings)


@pytest.mark.quick("{'health': {'nan': 'skip'}}")
@pytest.mark.parametrize(
    "settings", [{"trainer": {"accumulate": 2, "epochs": 2}}, {"health": {"nan": "skip"}}], ids=str
)
def test_nested_logs_of_updates_in_parts_or_guarded(
    ranks: Callable[..., Any], settings: dict[str, Any]
) -> None:
    mirrored = {"name": "tf_distribute", "strategy": "mirrored", "devices": 2}
    (ours,) = under(ranks, "mirrored", nested_logs, mirrored, settings)
    (reference,) = under(ranks, "local", nested_logs, {"name": "local"}, settings)
    compare_zoo("nested_logs", reference, ours)
