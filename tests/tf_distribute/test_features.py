"""What the Trainer offers, under strategies: precision, dropout, predict, scopes, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.dist.small import more, small_model
from tests.tf_distribute.running import close, make_devices, under

OTHERS = {  # backends that are no strategies
    "local": ["backend=local"],
    "data_parallel": ["backend=data_parallel", "backend.engine=mpi"],
    "pipeline": ["backend=pipeline", "backend.partitions=2", "backend.microbatches=2"],
}


def trainer(
    strategy: str = "mirrored", devices: int | None = 2, callbacks: Any = (), **more: Any
) -> Any:
    """A quiet Trainer; `more` are keys with `__` for dots."""
    from ktrainer import Trainer

    words = [f"{key.replace('__', '.')}={value}" for key, value in more.items()]
    if strategy not in ("data_parallel", "pipeline"):  # which have processes of their own
        make_devices()
    if strategy in OTHERS:
        words = [*OTHERS[strategy], *words]
    else:
        words = ["backend=tf_distribute", f"backend.strategy={strategy}", *words]
        if strategy == "multi_worker_mirrored":
            devices = 1
        elif strategy == "parameter_server":
            devices = None
        words += [] if devices is None else [f"backend.devices={devices}"]
    quiet = {"logging": {"progress": "none", "csv": False}, "data": {"shuffle": False}}
    return Trainer(quiet, callbacks, words)


def vectors(rows: int = 70) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 8)).astype("float32")
    return x, (x @ random.normal(size=(8, 3))).argmax(-1)


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def half_precision(strategy: str, policy: str, bad: int | None, **more: Any) -> Any:
    """Train with a loss scale; row `bad` is NaN, which one replica alone sees."""
    import keras

    x, y = vectors()
    if bad is not None:
        x[bad] = np.nan
    keras.utils.set_random_seed(0)
    settings = {"trainer__precision": policy, "data__batch_size": 16, "health__nan": "ignore"}
    settings |= more
    with trainer(strategy, **settings) as it:
        it.fit(small_model, (x, y))
        optimizer = it.model.optimizer
        scale = getattr(optimizer, "dynamic_scale", None)
        return (
            weights_of(it.model),
            None if scale is None else float(scale.numpy()),
            int(optimizer.iterations.numpy()),
        )


@pytest.mark.quick("mirrored-words1-18")
@pytest.mark.parametrize(
    ("strategy", "words", "bad"),
    [
        ("mirrored", {}, None),
        ("mirrored", {}, 18),  # on the first replica
        ("central_storage", {}, 30),  # on the second
        ("mirrored", {"trainer__xla": "true"}, 18),
        # A NaN on one process alone, where Keras' own optimizer waits for ever.
        ("multi_worker_mirrored", {}, 30),
    ],
)
def test_mixed_float16_replicas_agree_on_the_loss_scale(
    ranks: Callable[..., Any], strategy: str, words: dict[str, str], bad: int | None
) -> None:
    (truth,) = under(ranks, "local", half_precision, "local", "mixed_float16", bad)
    for ours in under(ranks, strategy, half_precision, strategy, "mixed_float16", bad, **words):
        assert ours[1:] == truth[1:]
        assert ours[2] == (5 if bad is None else 4)  # of 5 batches
        assert all(np.isfinite(value).all() for value in ours[0])
        # float16 has 11 bits, and gradients of two halves of a batch round apart.
        close(ours[0], truth[0], 0, 5e-4)


def compiled_by_xla(strategy: str) -> int:
    """How many functions of an update with `trainer.xla` are."""
    import tensorflow as tf

    from ktrainer.backends.tf_distribute.replicas.replica_accumulation import ReplicaAccumulation
    from ktrainer.steps import StepOptions

    spec = (tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int64))
    scalars = [tf.TensorSpec([2], tf.float64), tf.TensorSpec([0], tf.float64)]
    with trainer(strategy) as it:
        model, options = small_model(), StepOptions(xla=True)
        program = it.backend.prepare(model, options)
        program.build(spec)
        parts = ReplicaAccumulation(
            model, options, program.replicas, spec, program._logged["train"]
        )
        graph = parts.phase("compute").get_concrete_function(spec, *scalars).graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    return sum(op.get_attr("_XlaMustCompile") for op in calls)


def test_xla_compiles_the_step_of_each_replica(ranks: Callable[..., Any]) -> None:
    assert under(ranks, "mirrored", compiled_by_xla, "mirrored") == [2]


def test_mixed_bfloat16(ranks: Callable[..., Any]) -> None:
    (truth,) = under(ranks, "local", half_precision, "local", "mixed_bfloat16", None)
    (ours,) = under(ranks, "mirrored", half_precision, "mirrored", "mixed_bfloat16", None)
    close(ours[0], truth[0], 0, 4e-3)  # 8 bits


def masks(strategy: str) -> np.ndarray:
    """What dropout leaves of ones, by row."""
    import keras

    seen = []

    class Look(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            import tensorflow as tf

            return tf.numpy_function(lambda a: (seen.append(a), a)[1], [x], x.dtype)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    dropped = keras.layers.Dropout(0.5, seed=1)(inputs)
    model = keras.Model(inputs, Look()(dropped))
    # The check before the first update calls layers, too.
    with trainer(strategy, data__batch_size=8, health__verify="off") as it:

        class Ones(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.scale = model, keras.layers.Dense(1)

            def call(self, x: Any, training: bool = False) -> Any:
                import tensorflow as tf

                y = tf.ensure_shape(self.inner(x, training=training), (None, 64))
                return self.scale(y)

        ones = Ones()
        ones.compile("sgd", "mse")
        it.fit(ones, (np.ones((8, 64), "float32"), np.zeros((8, 1), "float32")))
    return np.stack([part for part in seen if len(part) == (4 if strategy != "local" else 8)])


def test_replicas_drop_different_units(ranks: Callable[..., Any]) -> None:
    (seen,) = under(ranks, "mirrored", masks, "mirrored")
    assert len(seen) == 2
    first, second = seen != 0
    assert 0.3 < first.mean() < 0.7
    assert 0.3 < (first != second).mean() < 0.7  # equal masks would differ nowhere


def predicted(strategy: str, devices: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    x, y = vectors(37)
    with trainer(strategy, devices, data__batch_size=16) as it:
        model = small_model()
        before = it.predict(model, x)  # nothing trained, nothing compiled here
        it.fit(model, (x, y), validation_data=(x, y))
        return before, it.predict(model, x), it.evaluate(model, (x, y))


@pytest.mark.quick
@pytest.mark.parametrize(("strategy", "devices"), [("mirrored", 3), ("central_storage", 2)])
def test_predict_and_evaluate(ranks: Callable[..., Any], strategy: str, devices: int) -> None:
    (ours,) = under(ranks, strategy, predicted, strategy, devices)
    (reference,) = under(ranks, "local", predicted, "local", 1)
    np.testing.assert_allclose(ours[0], reference[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours[1], reference[1], rtol=1e-4, atol=1e-5)
    assert ours[2] == pytest.approx(reference[2], rel=1e-5)


def places_of_batches(arrays: bool) -> list[str]:
    import tensorflow as tf

    from ktrainer.data import LocalBatch
    from ktrainer.training.fit_settings import step_options

    found: list[str] = []
    x, y = vectors(4)
    with trainer() as it:
        program, loop = it.backend.prepare(small_model(), step_options(it.config)), it.backend.loop
        program._functions = {
            kind: lambda batch, counts: found.extend(leaf.device for leaf in batch)
            for kind in ("train", "test")
        }
        local = LocalBatch((x, y) if arrays else (tf.constant(x), tf.constant(y)), 4, 4)
        with tf.device("CPU:3"):  # as the first GPU, where nothing else is said
            program.train([local])
            program.test(local)
            stacked = program._stacked([local, local])[0]
            rows = [it.strategy.experimental_local_results(leaf) for leaf in loop.rows(local)]
    assert [[len(part) for part in leaf] for leaf in rows] == [[2, 2], [2, 2]]
    found += [part.device for leaf in rows for part in leaf]
    return [*found, *(leaf.device for leaf in stacked)]


@pytest.mark.parametrize("arrays", [True, False])
def test_a_batch_of_several_devices_stays_in_host_memory(
    ranks: Callable[..., Any], arrays: bool
) -> None:
    (found,) = under(ranks, "mirrored", places_of_batches, arrays)
    assert len(found) == 10
    assert {place.rpartition("/")[2] for place in found} == {"device:CPU:0"}


def made_in_scope(strategy: str) -> Any:
    """A model made inside of `trainer.scope()`, which has been trained there before."""
    import keras

    x, y = vectors(48)
    with trainer(strategy, data__batch_size=16) as it:
        keras.utils.set_random_seed(0)
        with it.scope() if strategy != "local" else it.strategy.scope():
            extra = (keras.layers.BatchNormalization(synchronized=True), counting_layer())
            model = small_model(extra=extra)
        model.run_eagerly = True
        kinds = {type(v.value).__name__ for v in model.variables}
        logs = [it.fit(model, (x, y)).history for _ in range(2)]
        return kinds, weights_of(model), {k: [each[k] for each in logs] for k in logs[0]}


def counting_layer() -> Any:
    """Counts the rows that it is trained on."""
    import keras

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            settings = {"initializer": "zeros", "trainable": False, "aggregation": "sum"}
            self.seen = self.add_weight(name="seen", shape=(), **settings)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], self.seen.dtype))
            return x

    return Counting()


def test_a_model_made_in_the_scope_is_taken_as_it_is(ranks: Callable[..., Any]) -> None:
    """Eager; `test_scopes` has compiled ones."""
    (reference,) = under(ranks, "local", made_in_scope, "local")
    for strategy in ("mirrored", "data_parallel"):
        for ours in under(ranks, strategy, made_in_scope, strategy):
            assert ("MirroredVariable" in ours[0]) == (strategy == "mirrored")
            close(ours[1], reference[1])
            for key, values in reference[2].items():
                np.testing.assert_allclose(ours[2][key], values, rtol=1e-5, err_msg=key)


def statistics(strategy: str) -> Any:
    """Those of a plain BatchNormalization, on each replica of this process."""
    import keras

    x, y = vectors(33)  # the last batch has one row: one replica has padding
    with trainer(strategy, data__batch_size=16) as it:
        keras.utils.set_random_seed(0)
        model = small_model(extra=(keras.layers.BatchNormalization(),))
        it.fit(model, (x, y))
        moving = [v for v in model.non_trainable_variables if "moving" in v.path]
        found = [it.strategy.experimental_local_results(v.value) for v in moving]
        return [[np.array(each) for each in values] for values in found]


@pytest.mark.exhaustive
def test_statistics_are_the_same_on_all_replicas(ranks: Callable[..., Any]) -> None:
    """And in all processes; however two halves of a batch are computed."""
    names = ("mirrored", "central_storage", "multi_worker_mirrored")
    (mirrored,), (central,), by_rank = [under(ranks, name, statistics, name) for name in names]
    assert len(mirrored) == 2
    for i, (first, second) in enumerate(mirrored):
        assert np.isfinite(first).all()
        assert first.std() > 0
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(by_rank[0][i][0], by_rank[1][i][0])
        for other in (central[i][0], by_rank[0][i][0]):
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-7)


def graphs_refused(more: dict[str, Any]) -> str:
    """What is said of batches with as many edges as there happen to be."""
    import keras
    import tensorflow as tf

    from ktrainer.errors import DataError

    nodes, edges = keras.Input((4,), name="nodes"), keras.Input((2,), name="edges")
    joined = [keras.layers.Dense(1)(nodes), keras.ops.sum(edges, keepdims=True)]
    model = keras.Model([nodes, edges], keras.layers.Add()(joined))
    model.compile("sgd", "mse")
    batch = ((np.zeros((8, 4)), np.zeros((5, 2))), np.zeros((8, 1)))
    with trainer(**more) as it, pytest.raises(DataError) as caught:
        it.fit(model, tf.data.Dataset.from_tensors(batch).repeat(4))
    return str(caught.value)


@pytest.mark.parametrize("more", [{}, {"trainer__steps_per_call": 2}, {"trainer__accumulate": 2}])
def test_batches_whose_first_axis_is_not_examples_are_refused(
    ranks: Callable[..., Any], more: dict[str, Any]
) -> None:
    (text,) = under(ranks, "mirrored", graphs_refused, more)
    assert "cannot be cut into 2 parts" in text
    assert "5" in text
    assert text.endswith("Set backend.devices=1, which is one replica, or backend=local")


def own_metric(strategy: str) -> Any:
    """Metrics whose states do not add up, the largest output so far, beside some that do; and what
    is said of them."""
    import warnings

    import keras
    from keras import ops

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.maximum(self.value, ops.cast(ops.max(y_pred), "float32")))

        def result(self) -> Any:
            return self.value

    class LargestInMean(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign(ops.maximum(self.total, ops.max(y_pred)))
            self.count.assign(1.0)

    class Declared(LargestInMean):
        state_adds_up = False

    class Squared(keras.metrics.Mean):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(ops.square(y_pred), sample_weight)

    metrics = [Largest(), Declared(name="declared"), Squared(name="squared"), "accuracy"]
    metrics.append(LargestInMean(name="in_mean"))
    x, y = vectors(33)  # the last batch has one row: one replica is empty
    with trainer(strategy, data__batch_size=16) as it, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keras.utils.set_random_seed(0)
        model = small_model()
        model.compile("sgd", model.loss, metrics=metrics)
        history = it.fit(model, (x, y), validation_data=(x, y)).history
    return history, [str(each.message) for each in said]


def test_metrics_whose_states_do_not_add_up(ranks: Callable[..., Any]) -> None:
    ((ours, said),) = under(ranks, "mirrored", own_metric, "mirrored")
    ((reference, nothing),) = under(ranks, "local", own_metric, "local")
    assert nothing == []
    (told,) = (text for text in said if "state_adds_up" in text)
    assert "in_mean assigns its states by itself" in told
    assert list(ours) == list(reference)
    for key, values in reference.items():
        if not key.endswith("in_mean"):  # summed, as told
            np.testing.assert_allclose(ours[key], values, rtol=1e-5, err_msg=key)


def resumed(folder: str, first: tuple[str, int], then: tuple[str, int]) -> Any:
    """Three epochs, the first two under one backend, the last under another."""
    import keras

    x, y = vectors(41)
    for (strategy, devices), epochs in ((first, 2), (then, 3)):
        words = {"checkpoint__every": "1ep", "checkpoint__dir": folder, "trainer__epochs": epochs}
        with trainer(strategy, devices, data__batch_size=16, **words) as it:
            keras.utils.set_random_seed(epochs)
            model = small_model(extra=(keras.layers.BatchNormalization(synchronized=True),))
            model.compile(keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
            history = it.fit(model, (x, y)).history
    return weights_of(model), history


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("local", 1), ("mirrored", 3)),
        (("mirrored", 2), ("central_storage", 2)),
    ],
    ids=lambda pair: pair[0],
)
def test_checkpoints_go_from_one_backend_to_another(
    ranks: Callable[..., Any], tmp_path: Path, first: Any, then: Any
) -> None:
    local = ("local", 1)
    (ours,) = under(ranks, "mirrored", resumed, str(tmp_path / "ours"), first, then)
    (reference,) = under(ranks, "local", resumed, str(tmp_path / "reference"), local, local)
    close(ours[0], reference[0])
    assert len(ours[1]["loss"]) == 3
    np.testing.assert_allclose(ours[1]["loss"], reference[1]["loss"], rtol=1e-5)


def saved(folder: str) -> Any:
    import keras

    x, y = vectors(32)
    with trainer("mirrored", 2) as it:
        model = small_model()
        it.fit(model, (x, y))
        it.save(Path(folder) / "model.keras")
        inside = model.predict(x, verbose=0)
    kinds = {type(v.value).__name__ for v in model.variables}
    again = keras.models.load_model(Path(folder) / "model.keras")
    return inside, again.predict(x, verbose=0), kinds


def test_a_saved_model_is_an_ordinary_one_and_so_is_that_of_a_closed_trainer(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    ((inside, again, kinds),) = under(ranks, "mirrored", saved, str(tmp_path))
    np.testing.assert_allclose(inside, again, rtol=1e-6)
    assert kinds == {"ResourceVariable"}


def heard_of(strategy: str, steps_per_call: int) -> tuple[list[Any], int]:
    """The events of batches of a callback that need not act between the updates of a call, and the
    number of compiled calls of several updates."""
    from ktrainer.steps.train_many import StepLoop
    from tests.small import Listens

    seen = Listens()
    words = {"data__batch_size": 4, "trainer__steps_per_call": steps_per_call}
    spied = patch.object(StepLoop, "__call__", autospec=True, side_effect=StepLoop.__call__)
    with trainer(strategy, **words) as it, spied as loops:
        it.fit(small_model(), vectors(32), callbacks=[seen])
    return seen.heard, loops.call_count


def test_a_callback_hears_of_each_batch_of_a_call(ranks: Callable[..., Any]) -> None:
    ((several, loops), (single, no_loops)) = (
        under(ranks, "mirrored", heard_of, "mirrored", each)[0] for each in (3, 1)
    )
    assert (loops, no_loops) == (3, 0)
    assert several == single
    assert len(several) == 16


def test_callbacks_of_several_processes_are_called_once_a_call(ranks: Callable[..., Any]) -> None:
    for heard, loops in under(ranks, "data_parallel", heard_of, "data_parallel", 3):
        batches = [batch for _, batch, *_ in heard]
        assert (batches, loops) == ([0, 2, 3, 5, 6, 7], 3)


def stopped_in_a_call(strategy: str) -> tuple[int, list[str]]:
    """Updates made, and what is said, where the first of eight batches of a call has a NaN."""
    import warnings

    x, y = vectors(32)
    x[3] = np.nan
    words = {"data__batch_size": 4, "trainer__steps_per_call": 8, "health__verify": "off"}
    with trainer(strategy, **words) as it, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        it.fit(small_model(), (x, y))
        said = [str(each.message) for each in caught if "not finite" in str(each.message)]
        return it.state.progress.step, said


@pytest.mark.parametrize(
    ("strategy", "updates", "where"),
    [
        ("mirrored", [1], "at step 1 "),
        ("data_parallel", [8, 8], "by step 8 on rank 0 "),
        more("multi_worker_mirrored", [8, 8], "by step 8 on rank 0 "),
    ],
)
def test_a_call_of_several_updates_ends_at_a_loss_that_is_not_finite(
    ranks: Callable[..., Any], strategy: str, updates: list[int], where: str
) -> None:
    """In one process; several end together, with the call."""
    by_rank = under(ranks, strategy, stopped_in_a_call, strategy)
    assert [step for step, _ in by_rank] == updates
    (said,) = [text for _, texts in by_rank for text in texts]
    assert said.startswith(f"the loss is not finite {where}")
