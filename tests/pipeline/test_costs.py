"""Costs are counted by formula, or measured without touching the model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.graph.trace import trace
from ktrainer.backends.pipeline.partition.balance import balance_stages
from ktrainer.backends.pipeline.partition.costs import describe, node_costs, profile
from ktrainer.backends.pipeline.partition.partition_inputs import Settings
from ktrainer.errors import ConfigError
from tests.pipeline import models

_TOKENS = tf.TensorSpec((None, 6), "int32")


def _graph(*stack: Any, shape: tuple[int, ...] = (4,)) -> Graph:
    return trace(keras.Sequential([keras.Input(shape), *stack]))


def test_uniform_and_parameters() -> None:
    graph = _graph(layers.Dense(3), layers.BatchNormalization(), layers.ReLU())
    assert node_costs(graph, "uniform") == [1, 1, 1]
    assert node_costs(graph, "parameters") == [4 * 3 + 3, 4 * 3, 0]


@pytest.mark.parametrize(
    "layer, shape, flops",
    [
        (layers.Dense(3), (4,), 2 * 2 * 4 * 3 + 2 * 3),
        (layers.Dense(3, use_bias=False), (5, 4), 2 * 2 * 5 * 4 * 3),
        (layers.Conv2D(6, 3, padding="same", use_bias=False), (8, 8, 3), 2 * 2 * 64 * 6 * 27),
        (layers.Conv3D(2, 2, use_bias=False), (3, 3, 3, 4), 2 * 2 * 8 * 2 * 32),
        (layers.DepthwiseConv2D(3, padding="same", use_bias=False), (8, 8, 3), 2 * 2 * 64 * 3 * 9),
        (layers.Conv2DTranspose(5, 2, use_bias=False), (3, 3, 4), 2 * 2 * 9 * 4 * 5 * 4),
        (layers.EinsumDense("abc,cde->abde", (None, 3, 2)), (5, 4), 2 * 2 * 5 * 4 * 3 * 2),
        (layers.Flatten(), (3, 4), 0),
        (layers.ReLU(), (3, 4), 2 * 12),
        (layers.Embedding(9, 4), (3,), 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_flops_of_a_layer_for_two_examples(layer: Any, shape: tuple[int, ...], flops: int) -> None:
    assert node_costs(_graph(layer, shape=shape), "flops", batch=2) == [flops]


def test_flops_of_ops_and_loops() -> None:
    left = keras.Input((3, 4))
    product = ops.matmul(left, ops.transpose(left, (0, 2, 1)))
    costs = node_costs(trace(keras.Model(left, product)), "flops", batch=2)
    assert sum(costs) == 2 * 2 * 3 * 3 * 4
    one, ten = (
        node_costs(_graph(layers.SimpleRNN(4), shape=(steps, 3)), "flops")[0] for steps in (1, 10)
    )
    assert one >= 2 * (3 + 4) * 4
    assert ten == 10 * one


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"backend.costs: .*Did you mean 'flops'"):
        node_costs(_graph(layers.Dense(1)), "flop")


def test_a_profile_measures_each_node_and_changes_nothing() -> None:
    model = models.residual_cnn()
    before = [v.numpy() for v in model.variables]
    graph = trace(model)
    seconds = profile(graph, batch=2, runs=2)
    assert len(seconds) == len(graph.nodes)
    assert all(s > 0 for s in seconds)
    for a, v in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, v.numpy())


def test_a_profile_finds_the_costly_layer() -> None:
    graph = _graph(layers.Dense(4), layers.Dense(1500), layers.Dense(1500, name="big"))
    seconds = node_costs(graph, "profile", batch=64)
    assert max(zip(seconds, (n.name for n in graph.nodes), strict=True))[1] == "big"


def test_a_profile_takes_whole_numbers_and_an_example() -> None:
    graph = trace(models.Tied(), _TOKENS)
    assert len(profile(graph, batch=2, runs=1)) == len(graph.nodes)
    tokens = np.ones((2, 6), "int32")
    assert len(profile(graph, tokens, runs=1)) == len(graph.nodes)


def test_a_description_has_the_bytes_of_a_microbatch() -> None:
    model = models.Tied(words=20, width=8, depth=1)
    graph = trace(model, _TOKENS)
    nodes, sizes, outputs = describe(graph, node_costs(graph, "uniform"), batch=3)
    assert sizes[graph.tensors[0].name] == 3 * 6 * 4
    assert sizes["embed"] == 3 * 6 * 8 * 4
    assert sizes["derived"] == 20 * 8 * 4
    assert outputs == ["matmul"]
    assert sizes["matmul"] == 3 * 6 * 20 * 4
    by_name = {n.name: n for n in nodes}
    (table,) = by_name["embed"].variables
    assert (table.bytes, table.parameters, table.trainable) == (20 * 8 * 4, 160, True)
    assert by_name["derived"].variables == (table,)
    assert not by_name["drop"].variables[0].trainable
    result = balance_stages(nodes, sizes, outputs, 2, Settings(memory_weight=0))
    assert result.shared == {"tied/embed/embeddings": (0, 1)}
    whole = balance_stages(nodes, sizes, outputs, 1)
    assert whole.stages[0].parameters == sum(int(np.prod(v.shape)) for v in model.variables)
    assert "shared by stages 0, 1: tied/embed/embeddings" in str(result)


def test_an_early_output_crosses_to_the_last_stage() -> None:
    graph = trace(models.two_in_two_out())
    result = balance_stages(*describe(graph, node_costs(graph, "uniform"), batch=2), 6)
    made = result.stage_of["early"]
    assert all("early" in s.crossing for s in result.stages[made:-1])
