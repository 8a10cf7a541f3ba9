"""What cannot equal one process, or `Model.fit`, is said before the first update."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktrainer import Trainer

NORMALISED = (
    "unlike one process: plain, nested/plain (BatchNormalization) uses the statistics of each "
    "local batch; synchronized=True uses the whole batch's"
)
DRAWN = "unlike one process: drops draws random numbers for each local batch"
ROUNDING = (
    "unlike one process: the gradient of attends/key/bias is no more than rounding errors, which "
    "the optimizer scales up"
)
LENGTH = (
    "unlike Model.fit: Keras counts one optimizer iteration too many in each epoch of data of "
    "unknown length"
)


def _model(optimizer: str) -> Any:
    """Of each kind a layer that differs, and layers of the same classes that do not."""
    import keras
    from keras import layers

    plain = layers.BatchNormalization(name="plain")
    nested = keras.Sequential([keras.Input((4, 6)), plain], name="nested")
    frozen = layers.BatchNormalization(trainable=False)
    x = inputs = keras.Input((4, 6))
    for layer in (
        layers.BatchNormalization(name="plain"),
        nested,
        frozen,
        layers.BatchNormalization(synchronized=True),
        layers.Dropout(0.3, name="drops"),
        layers.Dropout(0.0),
        layers.GaussianNoise(0.0),
    ):
        x = layer(x)
    x = layers.MultiHeadAttention(2, 3, name="attends")(x, x)
    x = layers.LSTM(3)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(optimizer, "mse")
    return model


def _data(kind: str) -> Any:
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4, 6)).astype("float32")
    y = random.normal(size=(16, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    return data if kind == "known" else data.filter(lambda x, _: tf.reduce_all(x < 100))


def displayed(kind: str, optimizer: str, *words: str, fits: int = 1) -> list[str]:
    """The lines below the first one of what each `fit` displays."""
    settings = ["logging.progress=plain", "logging.csv=false", "trainer.epochs=1", *words]
    with redirect_stdout(io.StringIO()) as text, Trainer(None, (), settings) as trainer:
        model = _model(optimizer)
        for _ in range(fits):
            trainer.fit(model, _data(kind))
    return [each.strip() for each in text.getvalue().splitlines() if "unlike" in each]


@pytest.mark.exhaustive
def test_ranks(ranks: Callable[..., Any]) -> None:
    words = "known", "adam", "backend=data_parallel"
    first, second = ranks(2).run(displayed, *words, fits=2, deadline=120)
    assert (first, second) == ([NORMALISED, DRAWN, ROUNDING] * 2, [])


@pytest.mark.exhaustive
def test_ranks_without_an_optimizer_that_scales_rounding(ranks: Callable[..., Any]) -> None:
    first, _ = ranks(2).run(displayed, "unknown", "sgd", "backend=data_parallel", deadline=120)
    assert first == [NORMALISED, DRAWN, LENGTH]


@pytest.mark.parametrize(("kind", "expected"), [("known", []), ("unknown", [LENGTH])])
def test_one_process(ranks: Callable[..., Any], kind: str, expected: list[str]) -> None:
    assert ranks(1).run(displayed, kind, "adam") == [expected]


def _drawing(layer: Any) -> list[str]:
    """What is said of a model with one layer."""
    import keras

    from ktrainer.verify.first_update_check import UpdateFacts
    from ktrainer.verify.known_differences import known_differences
    from ktrainer.verify.update_split import Split

    inputs = keras.Input((4, 4, 3))
    feed = SimpleNamespace(num_batches=1)
    model = keras.Model(inputs, layer(inputs))
    return list(known_differences(model, feed, Split(replicas=2), UpdateFacts()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["weight", "array", "float32", "half", "text"])
def test_what_is_called_a_rate_may_be_anything(kind: str) -> None:
    import keras

    class Drops(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="drops")
            self.generator = keras.random.SeedGenerator(0)
            rates = {"array": np.zeros(3), "float32": np.float32(0.5), "half": 0.5, "text": "0"}
            self.rate = rates.get(kind)
            if kind == "weight":
                self.rate = self.add_weight(shape=(3,), initializer="zeros")

        def call(self, x: Any) -> Any:
            return x

    assert _drawing(Drops()) == [DRAWN]


def test_layers_that_draw_nothing_are_not_named() -> None:
    from keras import layers

    for layer in (layers.RandomRotation(0.0), layers.RandomContrast(0.0), layers.Dropout(0)):
        assert _drawing(layer) == []
    assert _drawing(layers.RandomRotation(0.1, name="drops")) == [DRAWN]
    assert _drawing(layers.RandomFlip(name="drops")) == [DRAWN]


def test_an_error_in_a_line_is_one_of_the_display() -> None:
    import keras

    class Broken(keras.layers.Layer):
        @property
        def rate(self) -> float:
            raise ValueError("no rate yet")

        def call(self, x: Any) -> Any:
            return x

    assert _drawing(Broken()) == [
        "differences from one process cannot be listed: ValueError: no rate yet"
    ]


def _rounding_only(model: Any, x: Any, y: Any) -> list[str]:
    import tensorflow as tf

    from ktrainer.data.local_batch import take_slice
    from ktrainer.verify.batch_invariant_random import RandomDraws
    from ktrainer.verify.eager_pass import GradientPasses, eager_passes
    from ktrainer.verify.gradient_compare import rounding_only

    draws, batch = RandomDraws(), (tf.constant(x), tf.constant(y))
    with eager_passes(draws):
        passes = GradientPasses(model, True, draws)
        whole = passes.whole(batch)
        halves = [take_slice(batch, len(x), part, 2) for part in range(2)]
        return rounding_only(whole, passes.split(halves, [0.5, 0.5]), model)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        *(("float32", name) for name in ("adam", "sgd", "scaled sgd", "scaled adam", "own")),
        ("float64", "adam"),
    ],
)
def test_the_bias_of_keys_is_rounding(dtype: str, optimizer: str) -> None:
    import keras
    from keras import layers

    class OfItsOwn(keras.Model):
        """Compiled without an optimizer, which is rmsprop by default."""

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.own.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 6), dtype=dtype)
    x = layers.MultiHeadAttention(2, 3, name="attends", dtype=dtype)(inputs, inputs)
    x = layers.Dense(1, dtype=dtype)(layers.Flatten(dtype=dtype)(x))
    kind = OfItsOwn if optimizer == "own" else keras.Model
    model = kind(inputs, x, dtype=dtype)
    chosen: Any = keras.optimizers.get(
        optimizer.rpartition(" ")[2] if kind is keras.Model else "sgd"
    )
    if optimizer.startswith("scaled"):
        chosen = keras.optimizers.LossScaleOptimizer(chosen)
    if kind is OfItsOwn:
        model.own = chosen
        model.compile(loss="mse")
    else:
        model.compile(chosen, "mse")
    chosen.build(model.trainable_variables)
    random = np.random.default_rng(0)
    data = random.normal(size=(16, 4, 6)).astype(dtype), random.normal(size=(16, 1)).astype(dtype)
    expected = ["attends/key/bias"] if optimizer.endswith("adam") else []
    assert _rounding_only(model, *data) == expected


def test_a_small_gradient_is_not_rounding() -> None:
    import keras
    import tensorflow as tf

    from ktrainer.verify.eager_pass import GradientPass
    from ktrainer.verify.gradient_compare import rounding_only

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="d")])
    weights = model.trainable_variables

    def one(bias: float) -> GradientPass:
        gradients: list[Any] = [tf.constant([[27.0]]), tf.constant([bias])]
        return GradientPass([gradients], [weights], scaled={v.path for v in weights})

    assert rounding_only(one(1.3e-5), one(0.9e-5), model) == []
    assert rounding_only(one(1.3e-6), one(0.9e-6), model) == [weights[1].path]
    assert rounding_only(one(1.3e-6), one(1.3e-6), model) == []


@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_synchronizes_the_microbatches_of_a_stage(microbatches: int) -> None:
    import keras

    from ktrainer.verify.first_update_check import UpdateFacts
    from ktrainer.verify.known_differences import known_differences
    from ktrainer.verify.update_split import Split

    layer = keras.layers.BatchNormalization(synchronized=True, name="together")
    model = keras.Sequential([keras.Input((4,)), layer])
    feed: Any = SimpleNamespace(num_batches=3)
    split = Split(replicas=3 - microbatches, microbatches=microbatches)
    said = list(known_differences(model, feed, split, UpdateFacts()))
    assert ["together (BatchNormalization)" in line for line in said] == [True] * (microbatches - 1)


def test_an_update_of_the_users_own_sees_one_stage() -> None:
    import keras

    from ktrainer.verify.first_update_check import UpdateFacts
    from ktrainer.verify.known_differences import known_differences
    from ktrainer.verify.update_split import Split

    class Clips(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(grads, trainable_variables)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    feed: Any = SimpleNamespace(num_batches=3)
    line = "unlike one process: Clips.apply gets the gradients of one stage at a time"
    for optimizer in (Clips(), keras.optimizers.LossScaleOptimizer(Clips()), "sgd"):
        model.compile(optimizer, "mse")
        for microbatches in (1, 2):
            split = Split(replicas=2, microbatches=microbatches)
            said = list(known_differences(model, feed, split, UpdateFacts()))
            assert (line in said) == (microbatches > 1 and optimizer != "sgd")


def _normalized(build: Callable[[Any, Any], Any], optimizer: str = "adam") -> list[str]:
    """What is said of `build(inputs, normalize)`, the normalization being a synchronized one."""
    import keras

    from ktrainer.verify.first_update_check import UpdateFacts
    from ktrainer.verify.known_differences import known_differences
    from ktrainer.verify.update_split import Split

    def normalize(x: Any) -> Any:
        return keras.layers.BatchNormalization(synchronized=True)(x)

    inputs = keras.Input((4, 2))
    model = keras.Model(inputs, build(inputs, normalize))
    model.compile(optimizer, "mse")
    feed: Any = SimpleNamespace(num_batches=3)
    return list(known_differences(model, feed, Split(replicas=2), UpdateFacts()))


def test_biases_that_a_normalization_subtracts_again() -> None:
    from keras import layers

    def before(**words: Any) -> Any:
        return layers.Dense(2, name="before", **words)

    def twice(x: Any, normalize: Any) -> Any:
        made = before()(x)
        return layers.add([normalize(made), normalize(made)])

    line = [ROUNDING.replace("attends/key", "before")]
    assert _normalized(lambda x, normalize: normalize(before()(x))) == line
    assert _normalized(twice) == line
    assert _normalized(lambda x, normalize: normalize(before()(x)), "sgd") == []
    for words in ({"use_bias": False}, {"activation": "relu"}, {"bias_regularizer": "l2"}):
        assert _normalized(lambda x, normalize: normalize(before(**words)(x))) == [], words  # noqa: B023
    assert _normalized(lambda x, normalize: before()(normalize(x))) == []
    recurrent = {"activation": None, "return_sequences": True}
    assert _normalized(lambda x, normalize: normalize(layers.LSTM(2, **recurrent)(x))) == []


def test_a_bias_that_something_else_reads_is_not_named() -> None:
    from keras import layers

    def skipping(x: Any, normalize: Any) -> Any:
        made = layers.Dense(2, name="before")(x)
        return layers.add([normalize(made), made])

    def with_output(x: Any, normalize: Any) -> Any:
        made = layers.Dense(2, name="before")(x)
        return [normalize(made), made]

    assert _normalized(skipping) == _normalized(with_output) == []


def counting(microbatches: int, own: bool) -> list[str]:
    """What is said of a layer that counts its calls, also where a step of the model's own counts
    its steps."""
    import keras

    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(initializer="zeros", trainable=False, name="calls")
            self.noise = keras.random.SeedGenerator(0)

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x + 0 * keras.random.normal(keras.ops.shape(x), seed=self.noise)

    class CountsSteps(keras.Model):
        def train_step(self, data: Any) -> Any:
            self.steps.assign_add(1.0)
            return super().train_step(data)

    stages = {"name": "pipeline", "partitions": 1, "microbatches": microbatches}
    with Trainer({"logging": {"progress": "none", "csv": False}, "backend": stages}) as trainer:
        inputs = keras.Input((4, 6))
        x = Counts(name="counts")(keras.layers.Flatten()(inputs))
        model = (CountsSteps if own else keras.Model)(inputs, keras.layers.Dense(1)(x))
        model.steps = keras.Variable(0.0, trainable=False)
        model.compile("sgd", "mse")
        trainer.fit(model, _data("known"), epochs=1)
        assert float(model.get_layer("counts").calls.value) == 2 * microbatches
        assert float(model.steps.value) == 2 * own
        return [line for line in trainer.state.differences if "assigned" in line]


@pytest.mark.parametrize(("microbatches", "own"), [(1, False), (2, False), (2, True)])
def test_what_layers_assign_in_each_microbatch(
    ranks: Callable[..., Any], microbatches: int, own: bool
) -> None:
    line = "unlike one process: what a layer assigns to counts/calls is assigned in each microbatch"
    expected = [line] if microbatches > 1 else []
    assert ranks(1).run(counting, microbatches, own, deadline=120) == [expected]


def test_what_layers_do_in_each_accumulated_batch() -> None:
    import keras
    from keras import layers

    settings = {"logging": {"progress": "none", "csv": False}, "trainer": {"accumulate": 2}}
    with Trainer(settings) as trainer:
        x = inputs = keras.Input((4, 6))
        for layer in (
            layers.Flatten(),
            layers.SpectralNormalization(layers.Dense(3, name="dense"), name="spectral"),
            layers.BatchNormalization(synchronized=True, name="plain"),
            layers.Dropout(0.3, name="drops"),
            layers.Dense(1),
        ):
            x = layer(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        trainer.fit(model, _data("known"), epochs=1)
        normalised, drawn, assigned, *more = trainer.state.differences
    assert more == []
    assert normalised == NORMALISED.partition("; synchronized")[0].replace(", nested/plain", "")
    assert drawn == DRAWN
    assert "what a layer assigns to spectral/" in assigned
    assert "dense/kernel" in assigned
    assert assigned.endswith("is assigned in each accumulated batch")


def test_silence_of_the_progress_bar_is_not_that_of_differences(capsys: Any) -> None:
    import keras

    model = keras.Sequential([keras.Input((4, 6)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Trainer() as trainer:
        for _ in range(2):
            trainer.fit(model, _data("unknown"), epochs=1, verbose=0)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"ktrainer: {LENGTH}"]
    assert captured.out == ""
