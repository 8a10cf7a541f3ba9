"""A step that is traced once for all replicas, as a TPU's is, gives the numbers of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.contracts import running
from tests.contracts.running import largest_difference, local
from tests.contracts.test_backends import compare as compare_zoo
from tests.dist.cases import Outcome
from tests.dist.small import more
from tests.tf_distribute.running import cases_under, make_devices, under, zoo_under
from tests.tf_distribute.test_equals_local import compare
from tests.tf_distribute.test_features import trainer, vectors

CHOSEN = [
    ("synchronized_batch_norm", "adamw"),
    ("masked_accumulated", "sgd"),
    ("several_outputs", "adamw"),
]
EXACT, NOISY = ["gan", "nested_logs", "averaged_weights"], ["batch_norm_cnn", "vae"]
_strategies: dict[int, Any] = {}


@contextmanager
def cores_in_place(cores: int) -> Iterator[Any]:
    """Trainers with strategy=tpu have a TPUStrategy of as many CPU devices; it is given."""
    make_devices()
    from tests.tf_distribute.one_trace import tpu_strategy_on_cpus

    if cores not in _strategies:
        _strategies[cores] = tpu_strategy_on_cpus(cores)
    strategy = _strategies[cores]
    with patch("ktrainer.backends.tf_distribute.backend.open_strategy", lambda *_: strategy):
        yield strategy


@contextmanager
def tpu(cores: int, xla: bool = False) -> Iterator[None]:
    """The same, and their programs run on these devices."""
    from tests.tf_distribute.one_trace import on_cpus

    with cores_in_place(cores) as strategy, on_cpus(strategy, xla) as traces:
        yield
    assert len(traces.numbers) == traces.count  # once for all replicas
    # A number known while a program is traced would be a constant.
    assert all(number.op.type == "Placeholder" for number in traces.numbers)


def cases_traced_once(cores: int, chosen: list[tuple[str, str]], **more: Any) -> list[Outcome]:
    with tpu(cores):
        return cases_under("tpu", None, chosen, "float64", backend__tpu="local", **more)


@pytest.mark.parametrize(
    ("cores", "chosen", "settings"),
    [
        more(2, CHOSEN, {"trainer__epochs": 2}),
        (3, [("plain", "adamw")], {"trainer__epochs": 2, "trainer__steps_per_call": 3}),
    ],
)
def test_cases(ranks: Callable[..., Any], cores: int, chosen: Any, settings: Any) -> None:
    (ours,) = under(ranks, "tpu", cases_traced_once, cores, chosen, deadline=280, **settings)
    compare(ours, chosen, **settings)


def zoo_traced_once(names: list[str]) -> dict[str, list[running.Outcome]]:
    with tpu(2):
        return running.train(names, name="tf_distribute", strategy="tpu", tpu="local")


@pytest.mark.exhaustive
def test_models_of_the_zoo(ranks: Callable[..., Any]) -> None:
    """Noise is that of replicas which know their numbers as they are traced."""
    (ours,) = under(ranks, "tpu", zoo_traced_once, [*EXACT, *NOISY], deadline=200)
    (mirrored,) = under(ranks, "mirrored", zoo_under, "mirrored", 2, NOISY, deadline=200)
    for name in ours:
        reference = mirrored[name][0] if name in NOISY else local(name)
        compare_zoo(name, reference, ours[name][0])
        slots, variable = largest_difference(ours[name][0].slots, reference.slots)
        assert slots <= 1e-10, f"{name}: {variable} differs by {slots:.1e}"


def compiled_with_xla() -> tuple[list[float], Any]:
    """A step with statistics, noise and metrics, compiled as a whole."""
    import keras

    make_devices()
    x, y = vectors(33)
    middle = (keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    with tpu(2, xla=True), trainer("tpu", None, data__batch_size=16, backend__tpu="local") as it:
        from tests.dist.small import small_model

        history = it.fit(small_model(extra=middle), (x, y), validation_data=(x, y)).history
        return history, it.predict(it.model, x)


@pytest.mark.exhaustive
def test_xla_compiles_all_of_a_step(ranks: Callable[..., Any]) -> None:
    ((history, outputs),) = under(ranks, "tpu", compiled_with_xla)
    assert np.isfinite([*history["loss"], *history["val_loss"]]).all()
    assert outputs.shape == (33, 3)


def made_by_tensorflow() -> list[Counter[str]]:
    """The kinds of operations in the functions of an update, none of which is run."""
    import keras
    import tensorflow as tf

    from ktrainer.backends.tf_distribute.replicas.replica_accumulation import ReplicaAccumulation
    from ktrainer.steps import StepOptions
    from tests.dist.small import small_model

    make_devices()
    spec = (tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int64))
    share = tf.TensorSpec([2], tf.float64)
    layers = keras.layers
    middle = (layers.BatchNormalization(synchronized=True), layers.Dropout(0.5))
    middle += (layers.SpectralNormalization(layers.Dense(8)),)  # assigns a weight in the step
    with cores_in_place(2), trainer("tpu", None, backend__tpu="local") as it:
        model = small_model(extra=middle)
        program = it.backend.prepare(model, StepOptions())
        program.build(spec)
        functions = [program._function("train").trace]
        logged = program._logged["train"]
        options = StepOptions(accumulate=2)
        parts = ReplicaAccumulation(model, options, program.replicas, spec, logged)
        counted = parts.phase("count").get_concrete_function(spec, share)
        denominators = tf.TensorSpec(counted.structured_outputs.shape, tf.float64)
        functions.append(parts.phase("compute").get_concrete_function(spec, share, denominators))
        gradients = functions[-1].structured_outputs[1]
        functions.append(parts.phase("add").get_concrete_function(gradients, gradients))
        functions.append(parts.phase("update").get_concrete_function(gradients))
    return [Counter(op.type for op in each.graph.get_operations()) for each in functions]


def test_tensorflow_makes_programs_for_a_tpu(ranks: Callable[..., Any]) -> None:
    """Nothing is replaced but the names of the cores; and nothing can be run."""
    (found,) = under(ranks, "tpu", made_by_tensorflow)
    train, compute, add, update = found
    assert all(each["TPUReplicateMetadata"] == 1 for each in found)
    assert train["CrossReplicaSum"] > update["CrossReplicaSum"] > 0  # gradients; and statistics
    assert compute["CrossReplicaSum"] > add["CrossReplicaSum"] == 0


def refused(what: str) -> str:
    """What is said to a model that a TPU cannot train."""
    import keras

    from ktrainer import all_gather
    from ktrainer.errors import ModelError

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros")

        def update_state(self, *_: Any, **__: Any) -> None: ...

        def result(self) -> Any:
            return self.value

    make_devices()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    loss = (lambda y, z: keras.ops.mean(all_gather(z))) if what == "gathers" else "mse"
    model.compile("sgd", loss, metrics=[Largest()] if what == "metric" else [])
    model.run_eagerly = what == "eager"
    x, _ = vectors(8)
    with (
        tpu(2),
        trainer("tpu", None, backend__tpu="local") as it,
        pytest.raises(ModelError) as caught,
    ):
        it.fit(model, (x, x[:, :3]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [("eager", "run_eagerly=False"), ("metric", "largest"), ("gathers", "gathered within a step")],
)
def test_refused(ranks: Callable[..., Any], what: str, says: str) -> None:
    (text,) = under(ranks, "tpu", refused, what)
    assert says in text
