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
from tests.dist.small import make_trainer, more, small_model
from tests.dist.test_same_numbers import _train_uneven
from tests.tf_distribute.running import cases_under, expected, make_devices, under, zoo_under
from tests.tf_distribute.test_features import trainer, vectors

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


def assigning_step(
    strategy: str, devices: int | None = None, resets: int = 2, **more: Any
) -> dict[str, Any]:
    """What a `train_step` gives that assigns its learning rate, resets metrics, and counts rows.

    Args:
        resets: how many metrics; the second one must see the outputs of all replicas.
    """
    import keras
    import tensorflow as tf

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros")

        def update_state(self, y: Any) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y)))

        def result(self) -> Any:
            return self.value

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            words = {"trainable": False, "aggregation": "sum", "initializer": "zeros"}
            self.seen = [self.add_weight((), dtype=t, **words) for t in ("float32", "int32")]
            self.last = self.add_weight((), **words)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                for seen in self.seen:
                    seen.assign_add(tf.cast(tf.shape(x)[0], seen.dtype))
                self.last.assign(0.0)
                self.last.assign_add(tf.reduce_sum(x))
            return x

    class Assigning(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.counting, self.dense = Counting(), keras.layers.Dense(3)
            self.of_batch = [keras.metrics.Sum(name="of_batch"), Largest()][:resets]

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(self.counting(x, training=training))

        def train_step(self, data: Any) -> Any:
            updates = tf.cast(self.optimizer.iterations, self.dtype)
            self.optimizer.learning_rate.assign(0.5 / (1 + updates))
            logs = super().train_step(data)
            for metric in self.of_batch:
                metric.reset_state()
                metric.update_state(data[0][:, 0])
                logs[metric.name] = metric.result()
            whole = tf.reduce_sum(data[1])
            return {**logs, "whole": whole, "float": tf.cast(whole, self.dtype)}

    use_float64()
    keras.utils.set_random_seed(0)
    with trainer(strategy, devices, data__batch_size=16, trainer__epochs=2, **more) as it:
        model = Assigning()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss)
        history = it.fit(model, vectors(33)).history
        values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    return {"history": history, "values": values}


XLA = {"trainer__xla": "true"}


@pytest.mark.quick("mirrored-2-settings0")
@pytest.mark.parametrize(
    ("strategy", "devices", "settings"),
    [
        ("mirrored", 2, {}),
        more("mirrored", 2, {**XLA, "resets": 1}),
        more("mirrored", 2, {"trainer__accumulate": 2}),
        ("one_device", None, {}),
        more(WORKERS, 1, {**XLA, "resets": 1}),
        ("data_parallel", None, {"resets": 0}),
        more("data_parallel", None, {**XLA, "resets": 0}),
        more("data_parallel", None, {"trainer__accumulate": 2, "resets": 0}),
    ],
)
def test_what_a_step_assigns(
    ranks: Callable[..., Any], strategy: str, devices: int | None, settings: dict[str, Any]
) -> None:
    alone = {key: value for key, value in settings.items() if key != "trainer__xla"}
    (truth,) = under(ranks, "local", assigning_step, "local", **alone)
    for ours in under(ranks, strategy, assigning_step, strategy, devices, **settings):
        assert ours["history"]["whole"] == pytest.approx(ours["history"]["float"])
        for key in truth["history"].keys() - {"whole", "float"}:
            mine, values = ours["history"][key], truth["history"][key]
            np.testing.assert_allclose(mine, values, rtol=1e-9, err_msg=key)
        for mine, value in zip(ours["values"], truth["values"], strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-9, atol=1e-11)


def weights_assigned_in_steps() -> list[Any]:
    """A bias that steps of `fit`, then of a loop, set to the mean of their rows, as it ends up."""
    import keras
    import tensorflow as tf

    class Centred(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.layers[0].bias.assign(tf.reduce_mean(data[0], 0))
            return logs

    x, _ = vectors(48)
    with trainer(WORKERS, data__batch_size=16) as it:
        model = Centred([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        it.fit(model, (x, x))
        found = [model.layers[0].bias.numpy()]
        with it.scope():
            weight = keras.Variable(tf.zeros(8))
        for batch in it.distribute(tf.data.Dataset.from_tensor_slices(x).batch(16)):
            it.run(lambda x: weight.assign(tf.reduce_mean(x, 0)), batch)
        return [*found, weight.numpy()]


@pytest.mark.exhaustive
def test_weights_that_steps_assign_are_those_of_replica_0(ranks: Callable[..., Any]) -> None:
    truth = vectors(48)[0][32:40].mean(0)
    for ours in under(ranks, WORKERS, weights_assigned_in_steps):
        for value in ours:
            np.testing.assert_allclose(value, truth, rtol=1e-5, atol=1e-6)


def skipped_gan(strategy: str, devices: int | None) -> str:
    """What is said of a step of two updates, one of which may be bad."""
    from ktrainer.errors import ModelError

    make_devices()
    backend: dict[str, Any] = {"name": "tf_distribute", "strategy": strategy, "devices": devices}
    with pytest.raises(ModelError) as caught:
        with_ktrainer(ZOO["gan"], backend=backend, health={"nan": "skip"})
    return str(caught.value)


@pytest.mark.parametrize(("strategy", "devices"), [("mirrored", 2), ("one_device", 1)])
def test_a_step_of_two_updates_is_not_half_skipped(
    ranks: Callable[..., Any], strategy: str, devices: int
) -> None:
    (said,) = under(ranks, strategy, skipped_gan, strategy, devices)
    assert "applies optimizers 2 times" in said
    assert "Set them to stop or rollback" in said
