"""Stages set by hand: scopes, patterns, and what is wrong with them."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops
from keras.src.ops.node import Node

from ktrainer.backends.pipeline.graph import call_hooks
from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.graph.stage_scopes import partition, stage_of
from ktrainer.backends.pipeline.graph.trace import trace
from ktrainer.backends.pipeline.partition.manual_stages import (
    stages_by_name,
    stages_by_pattern,
    stages_by_scope,
)
from ktrainer.errors import ConfigError
from tests.pipeline import models

_TOKENS = tf.TensorSpec((None, 6), "int32")


def _stages(graph: Graph, stages: list[int]) -> dict[str, int]:
    return {node.name: s for node, s in zip(graph.nodes, stages, strict=True)}


def test_scopes_take_what_is_created_inside_and_the_innermost_wins() -> None:
    with partition(0):
        a = layers.Dense(2)
        with partition(1):
            b = layers.Dense(2)
        c = layers.Dense(2)
    d = layers.Dense(2)
    assert [stage_of(x) for x in (a, b, c, d)] == [0, 1, 0, None]


def test_scopes_around_calls_of_a_functional_model() -> None:
    late = layers.Dense(4, name="late")
    inputs = keras.Input((4,))
    with partition(0):
        x = layers.Dense(4, name="early")(inputs)
        made_early = layers.Dense(4, name="made_early")
    with partition(1):
        x = made_early(late(x))
        x = x + 1
    graph = trace(keras.Model(inputs, layers.ReLU(name="relu")(x)))
    stages = _stages(graph, stages_by_scope(graph, 2))
    assert [stages[n] for n in ("early", "late", "made_early", "relu")] == [0, 1, 1, 1]
    assert list(stages.values()) == [0, 1, 1, 1, 1]


def test_a_call_of_a_shared_layer_has_a_stage_of_its_own() -> None:
    inputs = keras.Input((4,))
    again = layers.Dense(4, name="again")
    with partition(0):
        x = again(inputs)
    with partition(1):
        x = again(x)
    graph = trace(keras.Model(inputs, x))
    assert stages_by_scope(graph, 2) == [0, 1]


def test_scopes_in_a_subclassed_model_reach_into_its_layers() -> None:
    class Scoped(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            with partition(0):
                self.embed = layers.Embedding(20, 8, name="embed")
                self.created = models.Block(8, name="created")
            self.called = models.Block(8, name="called")

        def call(self, tokens: Any) -> Any:
            h = self.created(self.embed(tokens))
            with partition(1):
                return ops.relu(self.called(h))

    graph = trace(Scoped(), _TOKENS)
    stages = _stages(graph, stages_by_scope(graph, 2))
    assert {s for n, s in stages.items() if n.startswith(("embed", "created"))} == {0}
    assert {s for n, s in stages.items() if n.startswith("called")} == {1}
    assert stages["relu"] == 1


def test_scopes_around_nested_models() -> None:
    inputs = keras.Input((4,))
    with partition(0):
        first = keras.Sequential([layers.Dense(4), layers.ReLU()], name="first")
    second = keras.Sequential([layers.Dense(4), layers.ReLU()], name="second")
    x = first(inputs)
    with partition(1):
        x = second(x)
    graph = trace(keras.Model(inputs, x))
    assert stages_by_scope(graph, 2, default=1) == [0, 0, 1, 1]


def test_what_is_outside_of_scopes_goes_to_the_default_or_stays_with_its_inputs() -> None:
    inputs = keras.Input((4,))
    with partition(0):
        x = layers.Dense(4)(inputs)
    x = layers.ReLU()(x)
    x = layers.Dense(4)(x)
    graph = trace(keras.Model(inputs, x))
    assert stages_by_scope(graph, 2, default=1) == [0, 0, 1]
    assert stages_by_scope(graph, 2, default=0) == [0, 0, 0]


def test_what_no_output_depends_on_stays_with_its_inputs() -> None:
    class Probed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name in ("first", "second", "probe", "end"):
                setattr(self, name, layers.Dense(4, name=name))

        def call(self, x: Any) -> Any:
            with partition(0):
                x = self.first(x)
            with partition(1):
                x = self.second(x)
            self.end(self.probe(x))
            return x

    graph = trace(Probed(), tf.TensorSpec((None, 4)))
    stages = [0, 1, 1, 1]
    assert stages_by_scope(graph, 2) == stages
    assert stages_by_pattern({0: "first", 1: "second"}, graph) == stages
    assert stages_by_pattern({0: "first", 1: "second"}, graph, default=0) == stages


def test_nothing_of_keras_stays_replaced() -> None:
    def replaced() -> list[Any]:
        layer, variable = keras.layers.Layer, keras.Variable
        assigning = [layer.add_loss, variable.assign, tf.Variable(0.0).assign.__func__]
        return [vars(keras.Operation)["__new__"], Node.__init__, layer.symbolic_call, *assigning]

    before = replaced()
    with partition(0), partition(1):
        assert call_hooks.installed()
        assert replaced() != before
    assert not call_hooks.installed()
    assert replaced() == before
    with pytest.raises(ZeroDivisionError), partition(0):
        raise ZeroDivisionError
    trace(models.nested())
    assert not call_hooks.installed()
    assert replaced() == before


def test_a_scope_is_one_threads_own() -> None:
    inside, done = threading.Event(), threading.Event()
    made: list[Any] = []

    def other() -> None:
        inside.wait(10)
        made.append(layers.Dense(1))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with partition(1):
        inside.set()
        done.wait(10)
        mine = layers.Dense(1)
    thread.join()
    assert stage_of(mine) == 1
    assert stage_of(made[0]) is None


@pytest.mark.parametrize("index, nearest", [(-1, 0), (1.7, 2), ("a", 0), (True, 1)])
def test_a_scope_needs_the_number_of_a_stage(index: Any, nearest: int) -> None:
    with pytest.raises(ConfigError, match=f"chunks - 1.*value is {nearest}\\."), partition(index):
        pass


def test_a_scope_of_a_stage_that_is_not_there() -> None:
    class Far(keras.Model):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage
            self.dense = layers.Dense(4, name="dense")

        def call(self, x: Any) -> Any:
            with partition(self.stage):
                return self.dense(x)

    graph = trace(Far(3), tf.TensorSpec((None, 4)))
    with pytest.raises(ConfigError, match=r"'dense' .*partition\(3\).*test_manual.py:\d+.*to 4"):
        stages_by_scope(graph, 2)
    with pytest.raises(ConfigError, match=r"4 stages \(partitions x chunks\).*to 3") as caught:
        stages_by_scope(trace(Far(5), tf.TensorSpec((None, 4))), 4, chunks=2)
    assert (caught.value.path, caught.value.value) == ("backend.partitions", 2)
    with pytest.raises(ConfigError, match=r"backend.default_partition: must be from 0 to 3"):
        stages_by_scope(graph, 4, default=4)


def test_scopes_that_send_data_backwards() -> None:
    inputs = keras.Input((4,))
    with partition(1):
        x = layers.Dense(4, name="one")(inputs)
    x = layers.Dense(4, name="rest")(x)
    graph = trace(keras.Model(inputs, x))
    with pytest.raises(ConfigError, match="'rest' is on stage 0, but needs what 'one' on stage 1"):
        stages_by_scope(graph, 2)


@pytest.fixture(scope="module")
def tied() -> Graph:
    return trace(models.Tied(depth=3), _TOKENS)


def test_patterns_take_whole_layers_and_ops_follow(tied: Graph) -> None:
    patterns = {0: "embed|encoder/block_[01]", 1: "encoder/block_2", 2: "drop"}
    stages = _stages(tied, stages_by_pattern(patterns, tied, default=2))
    assert stages["embed"] == stages["encoder/block_1/add_1"] == stages["add"] == 0
    assert stages["encoder/block_2/attention"] == 1
    assert stages["drop"] == stages["matmul"] == stages["derived"] == 2


def test_later_calls_of_a_layer_match_as_the_first_does() -> None:
    graph = trace(models.shared_layer())
    assert stages_by_pattern({0: "first|again"}, graph) == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match="'again:1' is on stage 0, but needs what 'first'"):
        stages_by_pattern({0: "again", 1: "first"}, graph)


def test_the_stages_of_one_mode_carry_over_to_the_other() -> None:
    class Modes(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = layers.Dense(4, name="one"), layers.Dense(4, name="two")
            self.noise = layers.GaussianNoise(0.1, name="noise")

        def call(self, x: Any, training: bool = False) -> Any:
            x = self.one(x)
            if training:
                return self.two(self.noise(x))
            return ops.softmax(self.two(x))

    model, spec = Modes(), tf.TensorSpec((None, 4))
    training, inference = (trace(model, spec, training=t) for t in (True, False))
    stages = stages_by_pattern({0: "one|noise", 1: "two"}, training)
    other = stages_by_name(_stages(training, stages), inference)
    assert _stages(inference, other) == {"one": 0, "two": 1, "softmax": 1}
    assert stages_by_name({"one": 0, "softmax": 1, "two": 1}, training) == [0, 0, 1]


def test_patterns_match_whole_names_only(tied: Graph) -> None:
    with pytest.raises(ConfigError, match=r"backend.stages.1: .*'block_2' matches no layer") as e:
        stages_by_pattern({0: "embed|encoder", 1: "block_2"}, tied, default=1)
    assert "'encoder/block_2'" in str(e.value)


@pytest.mark.parametrize(
    "patterns, message",
    [
        ({0: "embed|encoder/block_0", 1: "encoder"}, "'encoder/block_0/norm' is matched by"),
        ({0: "embed", 2: "encoder"}, "numbered from 0 without gaps, but these are \\[0, 2\\]"),
        ({0: "embed", 1: "enc("}, "backend.stages.1: 'enc\\(' is no regular expression"),
        ({0: "embed", 1: "encoder"}, "no pattern matches drop"),
        ({0: "encoder|drop", 1: "embed"}, "'encoder/block_0/norm' is on stage 0, but needs"),
    ],
)
def test_patterns_that_cannot_be(tied: Graph, patterns: dict[int, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stages_by_pattern(patterns, tied)
