"""What users do with a pipeline beside one `fit`, in one process: one partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import ConfigError, DataError, ModelError, Trainer
from ktrainer.backends.pipeline.stage.compiled_stage import CompiledStage
from ktrainer.data.batch_specs import spec_of
from ktrainer.data.local_batch import LocalBatch
from ktrainer.steps import StepOptions
from tests.pipeline.trained import aux, spectral
from tests.small import data, weights

PIPELINE = {"backend": {"name": "pipeline", "partitions": 1, "microbatches": 2}}


def make(more: dict[str, Any] | None = None, **trainer: Any) -> Trainer:
    config = {
        "trainer": trainer,
        "data": {"batch_size": 8, "shuffle": False},
        "logging": {"progress": "none", "csv": False},
        "checkpoint": {"resume": "never"},
    }
    return Trainer({**config, **(PIPELINE if more is None else more)})


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with make() as it:
        yield it


def build(optimizer: Any = "sgd", layer: Any = None, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    middle = [layer] if layer is not None else []
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), *middle, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, **{"loss": loss, **compiled})
    return model


class Penalty(layers.Layer):
    """The model's only loss, added inside."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def test_predict_and_evaluate_without_fit(trainer: Trainer) -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    x, y = data()
    np.testing.assert_allclose(trainer.predict(model, x), model(x), rtol=1e-5)
    compiled = build()
    logs = trainer.evaluate(compiled, (x, y))
    np.testing.assert_allclose(logs["loss"], compiled.evaluate(x, y, verbose=0), rtol=1e-5)


def test_predict_of_a_compiled_model_comes_before_anything_else(trainer: Trainer) -> None:
    model, (x, y) = build(metrics=["accuracy"]), data()
    np.testing.assert_allclose(trainer.predict(model, x), model(x), rtol=1e-5)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    for key, value in trainer.evaluate(model, (x, y)).items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5)
    trainer.fit(model, (x, y))


def test_a_model_is_trained_on_in_several_fits(trainer: Trainer) -> None:
    model = trainer.backend.build_model(build)
    for _ in range(3):
        trainer.fit(model, data())
    with make({}) as plain:
        expected = build()
        for _ in range(3):
            plain.fit(expected, data())
        for a, b in zip(weights(model), weights(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _continued() -> keras.Model:
    """A model with an optimizer's state, as one that was trained and saved has."""
    model = build(keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(100)
    model.optimizer.learning_rate = 0.001
    for variable in model.optimizer.variables[2:]:
        variable.assign(np.full(variable.shape, 0.1))
    return model


def test_the_function_sets_the_state_of_the_optimizer(trainer: Trainer) -> None:
    with make({}) as plain:
        for it in (trainer, plain):
            it.fit(_continued, data())
        found, expected = (
            [*it.model.weights, *it.model.optimizer.variables] for it in (trainer, plain)
        )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_a_function_assigns_to_variables_that_it_has_not_made(trainer: Trainer) -> None:
    counter = keras.Variable(0, dtype="int32")

    def counted() -> keras.Model:
        counter.assign_add(1)
        return build()

    trainer.fit(counted, data())
    assert int(counter.numpy()) == 1


@pytest.mark.parametrize("how", ["fit", "train_on_batch", "evaluate"])
def test_a_function_that_trains_is_refused(trainer: Trainer, how: str) -> None:
    def trained() -> keras.Model:
        model = build()
        getattr(model, how)(*data(8))
        return model

    with pytest.raises(ModelError, match=r"also trains or evaluates it.*Train before"):
        trainer.fit(trained, data())


class _Untied(layers.Layer):
    """Computes with the weight of a layer that it does not track."""

    def __init__(self, other: layers.Layer) -> None:
        super().__init__()
        self.kernel = lambda: other.kernel

    def call(self, inputs: Any) -> Any:
        return inputs @ keras.ops.transpose(self.kernel())


def _untied() -> keras.Model:
    first = layers.Dense(5, name="first")
    stack = [first, layers.Dense(5, "tanh"), layers.Dense(5, "tanh"), _Untied(first)]
    model = keras.Sequential([keras.Input((6,)), *stack])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_weight_of_another_stage_that_is_not_tracked_is_refused(trainer: Trainer) -> None:
    chunks = {**PIPELINE["backend"], "schedule": "interleaved", "chunks": 2}
    with make({"backend": chunks}) as it, pytest.raises(ModelError) as error:
        it.fit(_untied, data())
    assert "first/kernel' is read on stage 1 by a layer that does not track" in str(error.value)
    trainer.fit(_untied, data())


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="an older Keras")
@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "MultiOptimizer"])
def test_optimizers_whose_state_cannot_be_placed_are_refused(trainer: Trainer, name: str) -> None:
    kinds = keras.optimizers
    arguments = (kinds.OptimizerMap(kinds.SGD()),) if name == "MultiOptimizer" else ()
    optimizer = getattr(kinds, name)(*arguments)
    with pytest.raises(ModelError, match=f"{name} is not supported.*backend=data_parallel"):
        trainer.fit(build(optimizer), data())
    with pytest.raises(ModelError, match=f"{name} is not supported"):
        trainer.fit(lambda: build(getattr(kinds, name)(*arguments)), data())


def test_a_model_compiled_again_or_unfrozen_is_refused(trainer: Trainer) -> None:
    model = build()
    trainer.fit(model, data())
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match="frozen"):
        trainer.fit(model, data())
    model.layers[0].trainable = True
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(ModelError, match="compiled again"):
        trainer.fit(model, data())
    with make() as other, pytest.raises(ModelError, match="another Trainer"):
        other.fit(model, data())


class _AssignsWeight(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        self.scale.assign(self.scale / 2)
        return self.scale * inputs


class _MaskedPenalty(layers.Layer):
    """A loss over the rows that a weight leaves, inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def call(self, inputs: Any) -> Any:
        rows = keras.ops.cast(inputs[:, 0] > 0, inputs.dtype)
        self.add_loss(self.loss(inputs, 0 * inputs, sample_weight=rows))
        return inputs


class _AssignsPlainVariable(layers.Layer):
    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False, name="count")
        self.branches = branches

    def call(self, inputs: Any) -> Any:
        if self.branches:
            add, reset = (lambda: self.count.assign_add(1.0), lambda: self.count.assign(0.0))
            tf.cond(tf.reduce_sum(inputs) > 0, add, reset)
        else:
            self.count.assign_add(1.0)
        return inputs


class _Augmenter:
    """A plain object, in which Keras finds no variables."""

    def __init__(self) -> None:
        self.seed = keras.random.SeedGenerator(1)

    def __call__(self, inputs: Any) -> Any:
        return inputs + keras.random.normal((1,), seed=self.seed)


class _DrawsByHelper(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.aug = _Augmenter()

    def call(self, inputs: Any) -> Any:
        return self.aug(inputs)


def _rematerialized() -> Any:
    with keras.RematScope("full"):
        return layers.Dense(4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_AssignsPlainVariable, "assigns the tf.Variable 'count:0'.*add_weight.*loss_scope=global"),
        (lambda: _AssignsPlainVariable(True), "assigns a tf.Variable .*cond.*add_weight"),
        (
            _DrawsByHelper,
            r"assigns '.*seed_generator_state' \(.*test_program.py:\d+\).*SeedGenerator.*itself",
        ),
        (
            lambda: layers.SpectralNormalization(layers.Dense(4)),
            "'spectral_normalization.*' assigns a weight.*backend=data_parallel",
        ),
        (_AssignsWeight, "the layer of .*scale' assigns a weight"),
        (_MaskedPenalty, r"computed inside a layer.*Pass it to compile"),
        (lambda: layers.Dense(4, dtype="float8_from_float32"), "'dense.*' computes in float8"),
        (_rematerialized, "'dense.*' was made in a keras.RematScope.*backend.recompute=true"),
    ],
)
def test_layers_that_parts_of_a_batch_would_change_are_refused(
    trainer: Trainer, layer: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        trainer.fit(build(layer=layer()), data())


@pytest.mark.parametrize("scope", ["local", "global"])
def test_draws_of_a_loss_that_the_loss_does_not_have_are_refused(scope: str) -> None:
    noisy = _Augmenter()
    model = build(loss=lambda _, z: keras.ops.mean(noisy(z) ** 2, -1))
    said = r"assigns '.*seed_generator_state'.*keras\.losses\.Loss"
    with make(loss_scope=scope) as trainer, pytest.raises(ModelError, match=said):
        trainer.fit(model, data())


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_side_effects_of_layers_that_nothing_reads_or_that_are_made_of_others() -> None:
    """Losses, statistics, counters and metrics; `test_equality` has the same over two stages."""
    found: list[Any] = []
    for more in ({"backend": {**PIPELINE["backend"], "microbatches": 1}}, {}):
        keras.utils.set_random_seed(1)
        with make(more) as it:
            history = it.fit(aux, data(32)).history
            found.append((history, it.evaluate(it.model, data(32)), it.model.weights))
    (*ours, mine), (*expected, theirs) = found
    for logs, truth in zip(ours, expected, strict=True):
        assert logs.keys() == truth.keys()
        for name, value in truth.items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=b.path)


def test_a_penalty_on_the_outputs_of_the_model_itself_is_refused(trainer: Trainer) -> None:
    model = build()
    model.activity_regularizer = keras.regularizers.L2(0.1)
    for run in (trainer.evaluate, trainer.fit):
        with pytest.raises(ModelError, match=r"has an activity_regularizer.*layer that computes"):
            run(model, data())


def test_layers_that_train_otherwise_in_parts_predict_and_evaluate(trainer: Trainer) -> None:
    model, (x, y) = build(layer=layers.SpectralNormalization(layers.Dense(4))), data()
    np.testing.assert_allclose(trainer.predict(model, x), model(x), rtol=1e-5, atol=1e-6)
    expected = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(model, (x, y))["loss"], expected, rtol=1e-5)


def test_weights_that_a_layer_assigns_in_a_step_of_its_own_are_refused(trainer: Trainer) -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    made = build()
    model = Own([keras.Input((6,)), layers.Dense(5), _AssignsWeight(), layers.Dense(3)])
    model.compile("sgd", made.loss)
    with pytest.raises(ModelError, match=r"the layer of .*scale' assigns a weight"):
        trainer.fit(model, data())


class Undeclared(keras.Model):
    """Trains its layers by the `training` of its call, which its `call` does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(3),
        ]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class UndeclaredOwn(Undeclared):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Undeclared, UndeclaredOwn])
def test_training_reaches_layers_of_a_call_without_it(kind: Callable[[], Any]) -> None:
    """Where the step gives it; Keras' own does not."""
    found = []
    for more in ({}, {"backend": {**PIPELINE["backend"], "microbatches": 1}}):
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with make(more) as it:
            history = it.fit(model, data(32)).history
            found.append((history["loss"], it.evaluate(model, data(32))["loss"], model.weights))
    (*truth, expected), (*ours, weights_found) = found
    for a, b in zip([*truth, *expected], [*ours, *weights_found], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    trains = kind is UndeclaredOwn
    assert bool(np.any(expected[4].numpy())) == trains


class Tracks(keras.Model):
    """As the documentation of `Model.compute_loss` has it: `metrics` leaves out Keras' own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
    ) -> Any:
        loss = keras.ops.mean((y_pred - y) ** 2)
        loss += keras.ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.loss_tracker.reset_state()

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


def test_a_model_that_lists_its_own_metrics_alone() -> None:
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    found = []
    for more in ({"backend": "local"}, {"backend": {**PIPELINE["backend"], "microbatches": 1}}):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = Tracks(inputs, layers.Dense(3)(layers.Dense(5)(inputs)))
        model.compile("sgd")
        with make(more) as it:
            history = it.fit(model, (x, x[:, :3])).history
            found.append((history["loss"], it.evaluate(model, (x, x[:, :3]))["loss"]))
    (losses, evaluated), (ours, ours_evaluated) = found
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    np.testing.assert_allclose(ours_evaluated, evaluated, rtol=1e-5)


def test_inputs_of_another_kind_are_refused_by_name(trainer: Trainer) -> None:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Concatenate()([a, b]))
    model.compile("sgd", "mse")
    left, right, y = (np.zeros((8, n), "float32") for n in (4, 3, 7))
    trainer.evaluate(model, ({"a": left, "b": right}, y))
    for given, message in (
        ({"a": left, "b": right[:, 0]}, r"'b' has shape \(None,\), .* for \(None, 3\)"),
        ({"a": left}, r"2 inputs \(a, b\).* given a:"),
        ({"a": left, "c": right}, r"2 inputs \(a, b\).* given a, c:"),
        (left, r"2 inputs \(a, b\).* given 1:"),
    ):
        with pytest.raises(DataError, match=message):
            trainer.predict(model, given)
        with pytest.raises(DataError, match=message):
            trainer.evaluate(model, (given, y))


def test_batches_whose_first_axis_is_not_examples_are_refused(trainer: Trainer) -> None:
    nodes, edges = keras.Input((4,), name="nodes"), keras.Input((2,), name="edges")
    joined = [layers.Dense(1)(nodes), keras.ops.sum(layers.Dense(1)(edges), 0, keepdims=True)]
    model = keras.Model([nodes, edges], layers.Add()(joined))
    model.compile("sgd", "mse")
    batch = ((np.zeros((8, 4)), np.zeros((5, 2))), np.zeros((8, 1)))
    graphs = tf.data.Dataset.from_tensors(batch).repeat(2)
    with pytest.raises(DataError, match=r"8, .*5, .*8\).*Set backend\.microbatches=1") as caught:
        trainer.fit(model, graphs)
    assert "per_worker" not in str(caught.value)


class Noise(layers.Layer):
    """Draws from Keras' global generator."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def test_the_global_seed_may_be_set_between_steps() -> None:
    """What is drawn then is what one process draws for the same microbatches: as in Keras, steps
    that are compiled already draw on from the generator that they know."""

    def train(seed: int, *words: dict[str, Any]) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with make({key: value for more in words for key, value in more.items()}) as it:
            model = build(layer=Noise())
            it.fit(model, data(32))
            keras.utils.set_random_seed(seed)
            it.fit(model, data(32))
            return weights(it)

    one = {"trainer": {"accumulate": 2}, "data": {"batch_size": 4, "shuffle": False}}
    ours, expected, other = train(5, PIPELINE), train(5, one), train(6, PIPELINE)
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-6)
    for mine, theirs in zip(ours, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def _size(_: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_pred), axis=-1)


def _penalised() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Penalty()])
    model.compile("sgd", metrics=[_size])
    return model


@pytest.mark.parametrize("targets", [True, False])
def test_the_only_loss_is_a_layer_s(trainer: Trainer, targets: bool) -> None:
    given = data() if targets else data()[0]
    found = []
    with make({}) as plain:
        for each in (trainer, plain):
            history = each.fit(_penalised, given).history
            found += [{**history}, each.evaluate(each.model, given)]
    for ours, expected in zip(found[:2], found[2:], strict=True):
        assert ours.keys() == expected.keys() == {"loss", "_size"}
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5)


def test_slots_are_told_from_the_optimizer_s_own_variables() -> None:
    """SGD without momentum has two variables of its own; this model has two weights."""
    from ktrainer.backends.pipeline.placement.variable_holders import build_optimizer

    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    assert build_optimizer(model) == {}
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    assert set(build_optimizer(model)) == {id(m) for m in model.optimizer.momentums}


def _lengths() -> tf.data.Dataset:
    """Batches of sequences of 3, then 9, in turn: an update of two has 36 elements."""
    random = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        for length in (3, 9, 3, 9, 3, 9):
            x = random.normal(size=(3, length, 2)).astype("float32")
            yield x, x.sum(-1, keepdims=True)

    spec = tuple(tf.TensorSpec((None, None, n), tf.float32) for n in (2, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def _sequence_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((None, 2)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.exhaustive
def test_accumulated_batches_of_several_lengths_count_by_elements() -> None:
    found: list[Any] = []
    for more in (PIPELINE, {}):
        with make(more, accumulate=2) as it:
            it.fit(_sequence_model, _lengths())
            found.append(weights(it))
    model = _sequence_model()  # by hand
    model.optimizer.build(model.trainable_variables)
    rows = list(_lengths())
    for (x, y), (a, b) in zip(rows[0::2], rows[1::2], strict=True):
        with tf.GradientTape() as tape:
            errors = [tf.reshape(model(p) - q, [-1]) for p, q in ((x, y), (a, b))]
            loss = tf.reduce_mean(tf.square(tf.concat(errors, 0)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients)
    for ours in found:
        for a, b in zip(ours, weights(model), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: keras.callbacks.BackupAndRestore("x"),
        lambda: keras.callbacks.TensorBoard(histogram_freq=1),
    ],
)
def test_callbacks_that_need_the_whole_model_are_refused(
    trainer: Trainer, callback: Callable[[], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"whole model.*trainer\.save"):
        trainer.fit(build, data(), callbacks=[callback()])


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_recomputation_keeps_what_a_stage_is_given_alone(schedule: str) -> None:
    kept: dict[bool, list[int]] = {}
    original = CompiledStage.forward

    def forward(stage: Any, arguments: Any) -> Any:
        made = original(stage, arguments)
        if stage.mode == "train":
            kept[recompute].append(sum(x.numpy().nbytes for x in made[-1].saved))
        return made

    for recompute in (False, True):
        kept[recompute] = []
        words = {**PIPELINE["backend"], "schedule": schedule, "recompute": recompute}
        with make({"backend": words}) as it, patch.object(CompiledStage, "forward", forward):
            it.fit(build, data(16))
    assert len(kept[False]) == 2 * 2  # in both batches of 8, four rows at a time
    assert min(kept[False]) >= 4 * 5 * 4  # what the first layer makes
    assert kept[True] == [0] * 4


class _Generated(layers.Layer):
    """Noise from a generator of TensorFlow's, in a function or a condition."""

    def __init__(self, inside: bool) -> None:
        super().__init__(name="generated")
        self.inside, self.generator = inside, tf.random.Generator.from_seed(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        def noise() -> Any:
            return self.generator.normal(tf.shape(inputs))

        return inputs * (tf.cond(inputs[0, 0] > 0, noise, noise) if self.inside else noise())


@pytest.mark.parametrize("inside", [False, True])
def test_recomputing_draws_of_a_generator_is_refused(inside: bool) -> None:
    words = {**PIPELINE["backend"], "recompute": True}
    with (
        make({"backend": words}) as it,
        pytest.raises(ModelError, match=r"'generated.*/.*tf\.random\.Generator.*recompute=false"),
    ):
        it.fit(build(layer=_Generated(inside)), data(16))


class _Scaled(layers.Layer):
    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.factor * tf.random.normal(tf.shape(inputs))


def test_recomputed_draws_of_tf_random_are_those_of_the_forward_pass() -> None:
    """The gradient of a factor of 1 is then the loss."""
    words = {**PIPELINE["backend"], "recompute": True, "microbatches": 3}
    with make({"backend": words, "health": {"verify": "off"}}) as it:
        model = keras.Sequential([keras.Input((6,)), _Scaled()])
        loss = lambda y, y_pred: keras.ops.mean(y * y_pred, axis=-1)  # noqa: E731
        model.compile(keras.optimizers.SGD(1.0), loss)
        losses = it.fit(model, (data(8)[0],) * 2).history["loss"]
        np.testing.assert_allclose(1 - weights(model)[0], losses[0], rtol=1e-4)


def test_gradients_go_through_complex_numbers_between_stages() -> None:
    """`test_equality` and `test_own_steps` have the same between processes."""
    found = []
    chunks = {**PIPELINE["backend"], "schedule": "interleaved", "chunks": 2, "microbatches": 1}
    for more in ({}, {"backend": chunks}):
        keras.utils.set_random_seed(1)
        with make(more) as it:
            found.append(it.fit(spectral, data(32)).history["loss"])
            found.append([w.numpy() for w in it.model.weights])
    loss, expected, ours, actual = found
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_models_are_let_go(trainer: Trainer) -> None:
    import gc
    import weakref

    model = build()
    trainer.fit(model, data())
    gone = weakref.ref(model)
    trainer.fit(build, data())
    del model
    gc.collect()
    assert gone() is None


def _scored() -> keras.Model:
    return build(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score(average=None)])


@pytest.mark.filterwarnings("ignore:the loss is not finite")
def test_a_metric_of_several_numbers_is_put_back_with_an_update_that_is_skipped() -> None:
    x, y = data(40)
    x[9] = np.nan  # in the second of five batches
    given = (x, np.eye(3, dtype="float32")[y])
    scores: list[Any] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scores.append(logs["f1_score"])
    )
    for more in (PIPELINE, {}):
        with make({**more, "health": {"nan": "skip"}}) as it:
            it.fit(_scored, given, callbacks=[note])
    ours, expected = np.split(np.array(scores), 2)
    assert ours.shape == (5, 3)
    np.testing.assert_allclose(ours, expected, 1e-5)
    np.testing.assert_array_equal(ours[0], ours[1])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("schedule", "precision"), [("1f1b", "float32"), ("zero_bubble", "mixed_bfloat16")]
)
def test_padding_leaves_no_trace_whatever_is_in_it(schedule: str, precision: str) -> None:
    """What a replica without examples computes on may be anything: here it gives NaN."""

    def train(*padding: LocalBatch) -> list[np.ndarray]:
        keras.config.set_dtype_policy(precision)
        with make({"backend": {**PIPELINE["backend"], "schedule": schedule}}) as trainer:
            model = build("adam")
            program = trainer.backend.prepare(model, StepOptions())
            program.build(spec_of(batch))
            for _ in range(2):
                program.train([LocalBatch(batch, 8, 8), *padding])
            return weights(model)

    x, y = data(8)
    batch = (tf.constant(x), tf.constant(y))
    try:
        alone = train()
        together = train(LocalBatch((batch[0] * np.inf, batch[1]), 0, 0))
    finally:
        keras.config.set_dtype_policy("float32")
    for one, other in zip(alone, together, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


class Annealed(keras.losses.Loss):
    """Grows with each call, and has noise."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.noise = keras.random.SeedGenerator(3)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.calls.assign(self.calls + 1.0)
        noise = keras.random.uniform((), 0.5, 1.5, seed=self.noise)
        return noise * (1 + 0.1 * self.calls) * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


def _annealed(*words: str) -> tuple[list[float], float]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 3))
    words = (*words, "trainer.epochs=2", "data.batch_size=8", "data.shuffle=false", "seed=1")
    with Trainer(
        overrides=[*words, "logging.progress=none", "logging.csv=false", "health.verify=off"]
    ) as trainer:
        layers = [keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)]
        model, loss = keras.Sequential(layers), Annealed()
        model.compile(keras.optimizers.SGD(0.01), loss)
        return trainer.fit(model, (x, y)).history["loss"], float(loss.calls.numpy())


@pytest.mark.parametrize("scope", ["local", "global"])
def test_what_a_loss_assigns_to_keras_variables_stays(scope: str) -> None:
    expected, calls = _annealed("backend=local")
    words = ("backend=pipeline", "backend.partitions=1", "backend.microbatches=1")
    found, again = _annealed(*words, f"trainer.loss_scope={scope}")
    assert found == pytest.approx(expected, rel=1e-5)
    assert calls == again == 8
