"""A traced graph computes what the model does, with the same variables and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ktrainer.backends.pipeline.graph.call_recorder import CallRecorder
from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.graph.trace import trace
from ktrainer.errors import DataError, ModelError
from tests.pipeline import models

_TOKENS = tf.TensorSpec((None, 6), "int32")


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 20, (3, 6)).astype("int32")


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def _sequential() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu"), layers.Dense(2)])


def _lists_of_one_input() -> keras.Model:
    inner, outer = keras.Input((3,)), keras.Input((4,))
    nested = keras.Model([inner], layers.Dense(2)(inner))
    return keras.Model([outer], [nested(layers.Dense(3, "relu")(outer))])


def test_models_of_a_list_of_one_input_are_opened() -> None:
    graph = trace(_lists_of_one_input(), tf.TensorSpec((None, 4)), training=False)
    assert not any(node.closed for node in graph.nodes)
    assert len(graph.nodes) == 2


_ZOO: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "sequential": (_sequential, None, _random(3, 4)),
    "lists of one input": (
        _lists_of_one_input,
        tf.TensorSpec((None, 4)),
        tf.constant(_random(3, 4)),
    ),
    "skip": (models.residual_cnn, None, _random(3, 8, 8, 3)),
    "nested": (models.nested, None, _random(3, 8)),
    "shared layer": (models.shared_layer, None, _random(3, 4)),
    "two in, two out": (
        models.two_in_two_out,
        None,
        {"left": _random(3, 4), "right": _random(3, 6)},
    ),
    "subclassed, tied": (models.Tied, _TOKENS, _tokens()),
}


@pytest.mark.parametrize("name", _ZOO)
def test_outputs_and_gradients_equal_the_models(name: str) -> None:
    make, spec, x = _ZOO[name]
    model = make()
    graph = trace(model, spec, training=False)
    _check_structure(graph, model)
    variables = [v.value for v in model.trainable_variables]

    def gradients(call: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = call(x)
            loss = sum(tf.reduce_sum(y**2) for y in keras.tree.flatten(outputs))
        return outputs, [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    ours, our_gradients = gradients(graph.compute)
    theirs, their_gradients = gradients(lambda x: model(x, training=False))
    keras.tree.assert_same_structure(ours, theirs)
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _check_structure(graph: Graph, model: keras.Model) -> None:
    there = set(graph.inputs)
    for node in graph.nodes:
        assert set(node.inputs) <= there, "a node needs a later one"
        there.update(node.outputs)
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names))
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))
    read = {id(v) for node in graph.nodes for v in node.variables}
    assert read == {id(v) for v in model.variables}
    assert not graph.unused


@pytest.mark.parametrize("name", ["sequential", "skip", "nested", "two in, two out"])
def test_a_functional_model_rebuilt_from_the_graph_is_the_same(name: str) -> None:
    make, _, x = _ZOO[name]
    model = make()
    graph = trace(model, training=False)
    inputs = keras.tree.map_structure(
        lambda ref: keras.Input(graph.tensors[ref.id].shape[1:], name=graph.tensors[ref.id].name),
        graph.input_structure,
    )
    rebuilt = keras.Model(inputs, graph.compute(inputs))
    for a, b in zip(keras.tree.flatten(rebuilt(x)), keras.tree.flatten(model(x)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_names_are_paths_and_shapes_leave_the_batch_open() -> None:
    graph = trace(models.nested())
    assert [n.name for n in graph.nodes] == [
        "middle/inner/first",
        _only(n.name for n in graph.nodes if "/add" in n.name),
        "middle/second",
        "last",
    ]
    assert {graph.tensors[n.outputs[0]].shape for n in graph.nodes} == {(None, 8), (None, 2)}


def test_names_are_the_same_each_time_and_in_both_modes() -> None:
    model = models.Tied()
    names = [[n.name for n in trace(model, _TOKENS, training=t).nodes] for t in (True, False)]
    assert names[0] == names[1]
    assert "encoder/block_1/attention" in names[0]
    assert [n for n in names[0] if n.startswith("encoder/block_0/")][2:] == [
        "encoder/block_0/add",
        "encoder/block_0/hidden",
        "encoder/block_0/relu",
        "encoder/block_0/add_1",
    ]


def _readers(graph: Graph) -> dict[str, list[str]]:
    """Names of the nodes that read each variable."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        for variable in node.variables:
            found.setdefault(graph.variable_names[id(variable)], []).append(node.name)
    return found


def test_a_shared_layer_is_several_nodes_that_share_variables() -> None:
    graph = trace(models.shared_layer())
    assert [n.name for n in graph.nodes] == ["again", "first", "again:1", "again:2"]
    assert _readers(graph) == {
        "again/kernel": ["again", "again:1", "again:2"],
        "again/bias": ["again", "again:1", "again:2"],
        "first/kernel": ["first"],
        "first/bias": ["first"],
    }


def test_tied_weights_are_shared_by_the_node_that_derives_from_them() -> None:
    model = models.Tied()
    graph = trace(model, _TOKENS)
    assert _readers(graph)["tied/embed/embeddings"] == ["embed", "derived"]
    model.embed.embeddings.assign(model.embed.embeddings * 3)
    np.testing.assert_array_equal(
        trace(model, _TOKENS, training=False).compute(_tokens()), model(_tokens())
    )


def test_the_mode_is_what_each_call_resolves_it_to() -> None:
    class Frozen(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = layers.BatchNormalization(name="frozen")
            self.free = layers.BatchNormalization(name="free")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.frozen(self.free(x), training=False)

    model = Frozen()
    spec = tf.TensorSpec((None, 4))
    for training in (True, False):
        graph = trace(model, spec, training=training)
        context = {n.name: n.context["training"] for n in graph.nodes}
        assert context == {"frozen": False, "free": training}


def test_a_closed_layer_hands_the_mode_to_layers_inside() -> None:
    """Its own `call` does not take it."""

    class Closed(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="closed")
            self.inner = layers.BatchNormalization()

        def call(self, x: Any) -> Any:
            return tf.identity(self.inner(x))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.closed = Closed()

        def call(self, x: Any, training: bool = False) -> Any:
            return self.closed(x)

    model, x = Model(), _random(3, 4)
    for training in (True, False):
        graph = trace(model, x, training=training)
        assert [n.name for n in graph.nodes] == ["closed"]
        np.testing.assert_allclose(graph.compute(x), model(x, training=training), rtol=1e-6)


def test_statistics_and_seeds_move_as_in_the_model() -> None:
    model, twin = models.residual_cnn(), models.residual_cnn()
    twin.set_weights(model.get_weights())
    x = _random(4, 8, 8, 3)
    trace(model).compute(x)
    twin(x, training=True)
    for a, b in zip(model.non_trainable_variables, twin.non_trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = models.nested()
    before = [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in model._flatten_layers()]
    weights = model.get_weights()
    trace(model)
    after = [(len(x._inbound_nodes), len(x._outbound_nodes)) for x in model._flatten_layers()]
    assert before == after
    for a, b in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert keras.Model.from_config(model.get_config()).count_params() == model.count_params()


class _Masked(keras.Model):
    """Masks that functional models make explicit go from layer to layer on their own here."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(20, 4, mask_zero=True, name="embed")
        self.one = layers.LSTM(4, return_sequences=True, name="one")
        self.two = layers.LSTM(3, name="two")

    def call(self, x: Any) -> Any:
        return self.two(self.one(self.embed(x)))


@pytest.mark.quick("True")
@pytest.mark.parametrize("functional", [False, True])
def test_masks_are_inputs_of_the_layers_that_read_them(functional: bool) -> None:
    model = _Masked()
    if functional:
        inputs = keras.Input((6,), dtype="int32")
        model = keras.Model(inputs, model.call(inputs))
    graph = trace(model, _TOKENS, training=False)
    by_name = {n.name: n for n in graph.nodes}
    masks = [t.id for t in graph.tensors if t.dtype == "bool"]
    assert len(masks) == 1
    assert graph.nodes[0].outputs == (masks[0],)
    assert masks[0] in by_name["one"].inputs
    assert masks[0] in by_name["two"].inputs

    x = _tokens()
    x[:, 3:] = 0
    tensors: dict[int, Any] = {0: tf.constant(x)}
    for node in graph.nodes:
        tensors.update(zip(node.outputs, node(tensors), strict=True))
        # As after a transfer, which brings values alone.
        tensors = {i: tf.constant(t.numpy()) for i, t in tensors.items()}
    np.testing.assert_array_equal(tensors[graph.outputs[0]], model(x))


def test_masks_inside_nested_models_are_seen_outside() -> None:
    tokens = keras.Input((6,), dtype="int32")
    embed = keras.Model(tokens, layers.Embedding(20, 4, mask_zero=True)(tokens), name="embed")
    inputs = keras.Input((6,), dtype="int32")
    model = keras.Model(inputs, layers.LSTM(3)(embed(inputs)))
    x = _tokens()
    x[:, 3:] = 0
    graph = trace(model, training=False)
    np.testing.assert_array_equal(graph.compute(x), model(x))
    assert graph.nodes[-1].masks


def test_mixed_precision_keeps_its_casts() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = models.Tied()
    graph = trace(model, _TOKENS, training=False)
    assert graph.tensors[graph.outputs[0]].dtype == "bfloat16"
    outputs = graph.compute(_tokens())
    assert outputs.dtype == "bfloat16"
    np.testing.assert_array_equal(tf.cast(outputs, "float32"), tf.cast(model(_tokens()), "float32"))


def test_losses_of_a_layer_called_twice_are_both_kept() -> None:
    inputs = keras.Input((4,))
    layer = layers.Dense(4, activity_regularizer="l2", name="layer")
    model = keras.Model(inputs, layer(layer(inputs)))
    x = _random(3, 4)
    model(x)
    expected = [float(loss) for loss in model.losses]
    trace(model, training=False).compute(x)
    assert [float(loss) for loss in layer.losses] == expected
    assert len(expected) == 2


def test_a_nested_model_that_is_called_twice() -> None:
    twin = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="dense")], name="twin")
    left, right = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([left, right], ops.abs(twin(left) - twin(right)))
    graph = trace(model, training=False)
    assert [n.name for n in graph.nodes][:2] == ["twin/dense", "twin/dense:1"]
    x = [_random(3, 4), _random(3, 4) + 1]
    np.testing.assert_array_equal(graph.compute(x), model(x))


def test_a_model_is_traced_without_allocating_its_variables() -> None:
    with keras.StatelessScope(initialize_variables=False):
        model = models.Tied()
        graph = trace(model, _TOKENS, training=False)
        assert all(v._value is None for v in model.trainable_variables)
    for variable in model.variables:
        variable._deferred_initialize()
    np.testing.assert_array_equal(graph.compute(_tokens()), model(_tokens()))


def test_a_layer_that_cannot_be_opened_is_one_node() -> None:
    class Raw(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="raw")
            self.inner = layers.Dense(4)

        def call(self, x: Any) -> Any:
            return tf.nn.relu(self.inner(x)) * tf.cast(tf.shape(x)[0], x.dtype)

    class Batch(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="batch")
            self.inner = layers.Dense(4)

        def call(self, x: Any) -> Any:
            return ops.reshape(self.inner(x), (ops.shape(x)[0], 2, 2))

    model = keras.Sequential([keras.Input((4,)), Raw(), Batch()])
    graph = trace(model, training=False)
    assert [n.name for n in graph.nodes] == ["raw", "batch"]
    assert "TensorFlow function" in str(graph.nodes[0].closed)
    assert graph.nodes[1].closed
    np.testing.assert_array_equal(graph.compute(_random(3, 4)), model(_random(3, 4)))


class _Adds(layers.Layer):
    """Made of another one; in training it adds a loss of weights, assigns, or draws."""

    def __init__(self, what: str) -> None:
        super().__init__(name=what)
        self.inner = layers.Dense(4, name="inner")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.plain = tf.Variable(0.0, trainable=False)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        effects = {
            "adds": lambda: self.add_loss(ops.sum(self.inner.kernel)),
            "counts": lambda: self.count.assign(self.count + 1),
            "plain": lambda: self.plain.assign_add(1.0),
            "draws": lambda: keras.random.normal((1,), seed=self.seed),
        }
        if training:
            effects[self.name]()
        return self.inner(x)


def test_a_layer_with_side_effects_is_one_node_in_both_modes() -> None:
    names = ("adds", "counts", "plain", "draws")
    model = keras.Sequential([keras.Input((4,)), *map(_Adds, names)])
    training = trace(model)
    inference = trace(model, training=False, like=training)
    assert [n.name for n in training.nodes] == [*names[:3], "draws/inner"]
    assert [n.name for n in inference.nodes] == [n.name for n in training.nodes]
    reasons = [str(n.closed) for n in training.nodes[:3]]
    for reason, part in zip(reasons, ("adds a loss", "the variable", "tf.Variable"), strict=True):
        assert part in reason
        assert reason.startswith(__file__)
    for layer in model.layers:
        assert layer.plain == layer.count == 0


def test_a_layer_with_side_effects_in_its_second_call_is_one_node_in_its_first() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.block = _Adds("counts")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.block(self.block(x, training=False), training=training)

    model, spec = Twice(), tf.TensorSpec((None, 4))
    training = trace(model, spec)
    assert [n.name for n in training.nodes] == ["counts", "counts:1"]
    inference = trace(model, spec, training=False, like=training)
    assert [n.name for n in inference.nodes] == ["counts", "counts:1"]


def test_a_layer_that_returns_nothing() -> None:
    class Checks(layers.Layer):
        def call(self, x: Any) -> None:
            self.add_loss(ops.mean(x))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.checks, self.dense = Checks(name="checks"), layers.Dense(2, name="dense")

        def call(self, x: Any) -> Any:
            self.checks(x)
            return self.dense(x)

    model, x = Model(), _random(3, 4)
    graph = trace(model, x)
    assert [(n.name, len(n.outputs)) for n in graph.nodes] == [("checks", 0), ("dense", 1)]
    np.testing.assert_array_equal(graph.compute(x), model(x))


def test_two_threads_trace_at_once() -> None:
    methods = [keras.layers.Layer.add_loss, keras.Variable.assign, tf.Variable(0.0).assign.__func__]
    both_in, first_out = threading.Barrier(2), threading.Event()

    class Model(keras.Model):
        def __init__(self, later: bool) -> None:
            super().__init__()
            self.later, self.block = later, _Adds("counts")

        def call(self, x: Any, training: bool = False) -> Any:
            if tracing.is_set():
                both_in.wait(30)
                assert not self.later or first_out.wait(30)
            return self.block(x, training=training)

    def traced(model: Model) -> list[str]:
        graph = CallRecorder(model, {})
        graph.record(keras.KerasTensor((None, 4)), True)
        if not model.later:
            first_out.set()
        return [call.node.operation.name for call in graph.calls]

    tracing, models_ = threading.Event(), [Model(False), Model(True)]
    for model in models_:
        model(_random(2, 4))
    tracing.set()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(traced, models_)) == [["counts"]] * 2
    now = [keras.layers.Layer.add_loss, keras.Variable.assign, tf.Variable(0.0).assign.__func__]
    assert now == methods


def test_other_threads_assign_while_a_model_is_traced() -> None:
    variable, plain = keras.Variable(0.0), tf.Variable(0.0)

    def assign() -> None:
        variable.assign(1.0)
        plain.assign(1.0)
        layers.Dense(1).add_loss(tf.constant(1.0))

    class Model(keras.Model):
        def call(self, x: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(assign).result()
            return x + 1

    trace(Model(), tf.TensorSpec((None, 4)))
    assert variable == plain == 1


def test_variables_that_nothing_reads_are_listed() -> None:
    class Spare(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = layers.Dense(2), layers.Dense(2)
            self.spare.build((None, 4))

        def call(self, x: Any) -> Any:
            return self.used(x)

    assert len(trace(Spare(), tf.TensorSpec((None, 4))).unused) == 2


def test_a_subclassed_model_must_be_told_its_inputs() -> None:
    with pytest.raises(ModelError, match="inputs_spec"):
        trace(models.Tied())


def test_the_number_of_inputs_is_checked() -> None:
    with pytest.raises(DataError, match=r"2 inputs \(left, right\), but was given 1"):
        trace(models.two_in_two_out()).compute({"left": _random(3, 4)})


def test_a_batch_of_data_serves_as_spec() -> None:
    graph = trace(models.Tied(), _tokens())
    assert graph.tensors[0].shape == (None, 6)


def _only(values: Any) -> Any:
    (value,) = values
    return value
