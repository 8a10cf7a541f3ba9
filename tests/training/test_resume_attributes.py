"""Resume of models with a `tf.Variable` or `tf.random.Generator`, of which Keras does not know."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer, distributed
from ktrainer.checkpoint.contents.validate_state import read_run
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.elastic import ElasticRecovery
from ktrainer.steps.named_variables import attribute_variables, layer_arrays, model_variables
from tests.training.test_resume_fit import data, settings

COUNT = "attribute/counter/module/0"
SETTINGS = {"trainer__accumulate": 1, "checkpoint__every": "5ba", "health__verify": "off"}


class Plain(keras.Model):
    """The model below, without what only TensorFlow knows of."""

    def __init__(self) -> None:
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3, name="head")(keras.layers.Dense(4, name="body")(inputs))
        super().__init__(inputs, outputs, name="alternating")


class Module(tf.Module):
    """Counts updates; has noise."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.noise = tf.Variable(0), [tf.random.Generator.from_seed(1)]


class Counter(keras.layers.Layer):
    """Keras numbers it, differently in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Module()


class Alternating(Plain):
    """Every second update goes the other way, and has noise."""

    def __init__(self) -> None:
        for _ in range(distributed.current_world().rank):
            Counter()
        super().__init__()
        self.counter, self.rows = Counter(), {"of": [tf.Variable(0)]}

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        n, (noise,) = self.counter.module.n, self.counter.module.noise
        n.assign_add(1)
        self.rows["of"][0].assign_add(tf.shape(x)[0])
        sign = tf.where(n % 2 == 0, -1.0, 1.0)
        return super().train_step((sign * x + noise.normal(tf.shape(x)), y))


class Differing(Alternating):
    """Ranks have more, and other, variables than the others."""

    def __init__(self) -> None:
        super().__init__()
        rank = distributed.current_world().rank
        self.seeded = tf.random.Generator.from_seed(rank)
        self.shaped = tf.Variable(tf.zeros(1 + rank))
        if rank:
            self.more = tf.Variable(0)


class Scaled(keras.losses.SparseCategoricalCrossentropy):
    """Divided by a moving average of itself."""

    def __init__(self) -> None:
        super().__init__(from_logits=True)
        self.means = [tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)]
        self.noise = keras.random.SeedGenerator(3)
        self.made = keras.Variable(0.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = super().call(y_true, y_pred)
        self.means[0].assign(0.9 * self.means[0] + 0.1 * tf.reduce_mean(values))
        self.made.assign(self.made + 1.0)
        noise = keras.random.uniform((), 0.5, 1.5, seed=self.noise)
        return noise * values / (self.means[0] + 0.1 * self.made)


class Growing(keras.optimizers.SGD):
    """Steps grow with the number of updates."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.made = tf.Variable(0.0)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.made.assign_add(0.1)
        super().apply([self.made * g for g in grads], trainable_variables)


class Within(keras.optimizers.SGD):
    """Adam does its steps."""

    def __init__(self) -> None:
        super().__init__(0.01)
        self.adam = keras.optimizers.Adam(0.01)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.adam.build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.adam.apply(grads, trainable_variables)


class Deep(Plain):
    """With a loss in a list, and an optimizer inside of one."""


def build(kind: Any = Alternating) -> keras.Model:
    keras.utils.set_random_seed(0)
    if kind is Scaled:
        model = Plain()
        model.compile(Growing(), Scaled())
        return model
    model = kind()
    if kind is Deep:
        model.compile(Within(), [Scaled()])
        return model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def train(words: list[str], kind: Any = Alternating) -> dict[str, Any]:
    keras.utils.clear_session()
    with Trainer(overrides=words) as trainer:
        model = build(kind)
        trainer.fit(model, data())
        found = model_variables(model) + attribute_variables(model)
        return {name: np.array(v.numpy()).tolist() for name, v in found}


def in_parts(directory: str, kind: Any = Alternating, **more: Any) -> list[Any]:
    """A run without interruption, and one that was stopped inside of its second epoch."""
    whole = train(settings(Path(directory) / "whole", **SETTINGS, **more), kind)
    words = settings(Path(directory) / "parts", **SETTINGS, **more)
    train([*words, "trainer.max_steps=18"], kind)
    return [whole, train(words, kind)]


def test_they_continue_where_they_were(tmp_path: Path) -> None:
    whole, parts = in_parts(str(tmp_path))
    assert parts == whole
    assert whole[COUNT] == 30


@pytest.mark.parametrize(
    "more", [{}, {"backend__strategy": "mirrored"}, {"backend__strategy": "central_storage"}]
)
def test_variables_of_a_loss_and_an_optimizer_resume(tmp_path: Path, more: dict[str, str]) -> None:
    words = {"backend": "tf_distribute", **more} if more else {}
    whole, parts = in_parts(str(tmp_path), Scaled, **words)
    assert parts == whole
    assert whole["attribute/alternating/loss/made"] == 30
    assert whole["attribute/alternating/optimizer/made"] == pytest.approx(3)
    assert whole["attribute/alternating/loss/means/0"] != 1


def test_variables_of_what_is_inside_of_a_loss_or_an_optimizer_resume(tmp_path: Path) -> None:
    whole, parts = in_parts(str(tmp_path), Deep)
    assert parts == whole
    assert whole["attribute/alternating/loss/0/made"] == 30  # as in earlier versions
    assert whole["attribute/alternating/loss/0/means/0"] != 1
    assert np.any(whole["attribute/alternating/optimizer/adam/_velocities/0"])


def test_names_of_variables_inside_of_schedules_and_in_rings() -> None:
    class Factor(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, optimizer: Any = None) -> None:
            self.factor, self.optimizer = tf.Variable(0.1), optimizer

        def __call__(self, step: Any) -> Any:
            return self.factor

    model = Plain()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(Factor()))
    model.compile(scaled, "mse")
    scaled.inner_optimizer._learning_rate.optimizer = scaled  # a ring
    model.more = [keras.optimizers.SGD(Factor())]
    assert [name for name, _ in attribute_variables(model)] == [
        "attribute/alternating/more/0/_learning_rate/factor",
        "attribute/alternating/optimizer/inner_optimizer/_learning_rate/factor",
    ]


def test_ranks_continue_too(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    words = {"backend": "data_parallel"}
    for whole, parts in ranks(2).run(in_parts, str(tmp_path), **words, deadline=120):
        assert parts == whole
        assert whole[COUNT] == 30


def test_what_ranks_assign_differently_is_named(ranks: Callable[..., Any], tmp_path: Path) -> None:
    first, none = ranks(2).run(unequal, str(tmp_path), deadline=120)
    (text,) = first
    names = "alternating/loss/means/0, projects/drawn, projects/several/1"
    assert f"ranks have different values of {names}, so training may differ" in text
    assert none == []


class Projects(keras.layers.Layer):
    """With constants that are drawn without a seed, as of random features."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = np.random.default_rng().normal(size=(6, 6)).astype("float32")
        self.several = [np.ones(2), tf.constant(np.random.default_rng().normal(size=2))]

    def call(self, x: Any) -> Any:
        return x @ self.drawn


def unequal(directory: str) -> list[str]:
    words = settings(Path(directory), backend="data_parallel", checkpoint__every="null")
    words = [word for word in words if not word.startswith("checkpoint")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Trainer(overrides=[*words, "health.verify=off"]) as trainer:
            model = keras.Sequential(
                [keras.Input((6,)), Projects(), keras.layers.Dense(3)], name="alternating"
            )
            model.compile("sgd", Scaled())
            trainer.fit(model, data())
    return [str(each.message) for each in said if "different values" in str(each.message)]


def test_what_differs_between_ranks_is_left_out(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    (counts, first), (others, none) = ranks(2).run(differing, str(tmp_path), deadline=120)
    assert counts == others == [18, 30]
    names = [f"attribute/alternating/{name}" for name in ("more", "seeded", "shaped")]
    saved, restored, again = first
    assert saved == again  # in each run once
    assert saved.startswith(f"{', '.join(names)}: this tf.Variable or tf.random.Generator differs")
    assert "seeded is not in the checkpoint; " in restored
    assert "more is not in the checkpoint" in restored  # as rank 1 says
    assert none == []


def differing(directory: str) -> tuple[list[int], list[str]]:
    words = settings(Path(directory), backend="data_parallel", **SETTINGS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = train([*words, "trainer.max_steps=18"], Differing)
        counts = [first[COUNT], train(words, Differing)[COUNT]]
    return counts, [str(each.message) for each in said if "attribute" in str(each.message)]


@pytest.mark.exhaustive
def test_stages_save_none(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    words = {"backend__partitions": 2, "backend__microbatches": 2, "trainer__epochs": 1}
    words = settings(tmp_path, backend="pipeline", **SETTINGS, **words)
    ranks(2).run(train, words, deadline=120)
    arrays, _ = read_run(Store(tmp_path / "checkpoints").entries()[0].path)
    assert not [name for name in arrays if name.startswith("attribute/")]


class Donor(distributed.SingleWorld):
    """A rank whose count is 5, and which has drawn."""

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        return {name: np.full_like(each, 5) for name, each in value.items()}


@pytest.mark.parametrize(("lags", "count"), [(True, 5), (False, 0)])
def test_ranks_that_lag_take_variables_from_the_donor(lags: bool, count: int) -> None:
    recovery, model = object.__new__(ElasticRecovery), build()
    recovery.model, recovery.world = model, Donor()  # type: ignore[assignment]
    before = model.counter.module.noise[0].state.numpy()
    recovery._broadcast_attributes(0, lags)
    assert model.counter.module.n.numpy() == count
    np.testing.assert_array_equal(model.counter.module.noise[0].state.numpy(), before)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Plain, Alternating, "module/0 is not in the checkpoint"),
        (Alternating, Plain, "module/0 is in the checkpoint only"),
    ],
)
def test_a_checkpoint_without_them(tmp_path: Path, first: Any, second: Any, says: str) -> None:
    """As of earlier versions: the weights are restored, and a warning names the rest."""
    words = settings(tmp_path, **SETTINGS)
    weights = train([*words, "trainer.epochs=1"], first)
    with pytest.warns(UserWarning, match=says):
        again = train([*words, "trainer.epochs=1"], second)
    assert again["model/head/kernel"] == weights["model/head/kernel"]


def test_a_variable_that_no_checkpoint_holds_is_named_once(tmp_path: Path) -> None:
    mean, weight = tf.Variable(1.0, name="mean"), tf.Variable(1.0, name="read_only")
    kept, annealed = tf.Variable(1.0, name="kept"), tf.Variable(1.0, name="annealed")

    def loss(y_true: Any, y_pred: Any) -> Any:
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        tf.cond(mean > 0, lambda: mean.assign(0.9 * mean), lambda: mean.assign_add(kept))
        kept.assign(weight)
        return values / mean * annealed

    class Keeps(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kept

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            annealed.assign(0.9 * annealed)

        def state_dict(self) -> dict[str, Any]:
            return {"kept": float(kept.numpy())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            kept.assign(state["kept"])

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Trainer(overrides=settings(tmp_path, **SETTINGS)) as trainer:
            model = Plain()
            model.compile("sgd", loss)
            trainer.fit(model, data(), callbacks=[Keeps()])
    texts = [str(each.message) for each in said if "checkpoints do not" in str(each.message)]
    assert len(texts) == 2
    assert "the variable 'mean', which updates assign, and no layer, loss" in texts[0]
    assert "the variable 'annealed', which updates read and the script changes" in texts[1]


def test_variables_of_a_loss_in_a_pipeline_are_named(tmp_path: Path) -> None:
    words = {"backend__partitions": 1, "trainer__loss_scope": "global", "trainer__epochs": 1}
    words = settings(tmp_path, backend="pipeline", **SETTINGS, **words)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(words, Scaled)
    texts = [str(each.message) for each in said if "of a pipeline" in str(each.message)]
    names = ("'Variable'", "'seed_generator_state'", "'variable'")
    assert [sum(name in text for text in texts) for name in names] == [1, 1, 1]


def test_draws_that_no_checkpoint_counts_are_named_once(tmp_path: Path) -> None:
    class Noise(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.cond(tf.size(x) > 0, lambda: x + tf.random.normal(tf.shape(x)), lambda: x)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Trainer(overrides=settings(tmp_path, **SETTINGS)) as trainer:
            model = keras.Sequential([keras.Input((6,)), Noise(), keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            trainer.fit(model, data())
    assert sum("random numbers with tf.random" in str(each.message) for each in said) == 1


def test_what_recurrent_layers_remember_is_no_alarm(tmp_path: Path) -> None:
    """Warnings are errors."""
    words = settings(tmp_path, **{**SETTINGS, "trainer__epochs": 1, "data__batch_size": 6})
    with Trainer(overrides=words) as trainer:
        cells = [keras.layers.Reshape((2, 3)), keras.layers.LSTM(3, stateful=True)]
        model = keras.Sequential([keras.Input(batch_shape=(6, 6)), *cells])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = data()
        trainer.fit(model, (x[:36], y[:36]))


def embed(words: list[str], text: str) -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    lookup = keras.layers.TextVectorization(5, output_mode="tf_idf", pad_to_max_tokens=True)
    lookup.adapt(text.split())
    with Trainer(overrides=words) as trainer:
        model = keras.Sequential([keras.Input((), dtype="string"), lookup, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        trainer.fit(model, (np.array(["red", "green"] * 20, object), np.ones(40)))


def test_a_resume_with_another_vocabulary_is_named(tmp_path: Path) -> None:
    words = settings(tmp_path, **SETTINGS)
    embed([*words, "trainer.max_steps=5"], "red green blue")
    embed([*words, "trainer.max_steps=10"], "blue red green")  # the same; warnings are errors
    with pytest.warns(UserWarning, match="vocabulary of the layer text_vectorization is not that"):
        embed([*words, "trainer.max_steps=15"], "red pink green")
    with pytest.warns(UserWarning, match="3 words, .* now, 3 words, .* then"):  # other tf-idf
        embed([*words, "trainer.max_steps=20"], "red red pink green")


def test_arrays_of_layers_that_are_numbers() -> None:
    words = keras.layers.TextVectorization(vocabulary=["a", "b"])
    scale = keras.layers.Normalization(mean=[1.0, 2.0], variance=[1.0, 1.0])
    scale.build((None, 2))
    model = keras.Sequential([scale, Projects()])
    names = [name for name, _ in layer_arrays(model)]
    assert {"normalization/mean", "projects/drawn", "projects/several/1"} <= {*names}
    kinds = {array.dtype.kind for _, array in layer_arrays(keras.Sequential([words]))}
    assert kinds <= {*"fiub"}  # its mask token is a string
