"""Batches that are not lists of examples: the nodes of graphs, and edges that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ktrainer.data.local_batch import first_rows, take_slice
from ktrainer.errors import DataError
from tests.contracts.running import use_float64
from tests.dist.small import make_trainer

Graph = tuple[tuple[np.ndarray, np.ndarray], np.ndarray]


def graph(seed: int, nodes: int, edges: int) -> Graph:
    random = np.random.default_rng(seed)
    ends = random.integers(0, nodes, (edges, 2))
    ends[0] = [0, nodes - 1]
    return (random.normal(size=(nodes, 3)), ends), random.normal(size=(nodes, 1))


def together(graphs: Sequence[Graph]) -> Graph:
    """One graph of several, which no edge connects."""
    first = np.cumsum([0, *(len(y) for _, y in graphs)])
    nodes = np.concatenate([x[0] for x, _ in graphs])
    edges = np.concatenate([x[1] + begin for (x, _), begin in zip(graphs, first, strict=False)])
    return (nodes, edges), np.concatenate([y for _, y in graphs])


def weights_after(by_rank: Sequence[Sequence[Graph]], **words: Any) -> list[np.ndarray]:
    """Weights after two epochs of each rank's own graphs."""
    import keras
    import tensorflow as tf

    use_float64()
    keras.utils.set_random_seed(1)

    class Messages(keras.layers.Layer):
        def call(self, nodes: Any, edges: Any) -> Any:
            sent = tf.gather(nodes, edges[:, 0])
            return nodes + tf.math.unsorted_segment_sum(sent, edges[:, 1], tf.shape(nodes)[0])

    nodes, edges = keras.Input((3,)), keras.Input((2,), dtype="int64")
    hidden = keras.layers.Dense(4, "tanh")(Messages()(nodes, edges))
    model = keras.Model([nodes, edges], keras.layers.Dense(1)(Messages()(hidden, edges)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    with make_trainer(**words) as trainer:
        mine = by_rank[trainer.world.rank]
        trainer.fit(model, lambda: iter(mine), epochs=2)
    return [np.asarray(value) for value in model.get_weights()]


def test_a_rank_without_graphs_is_padded_with_a_whole_one(ranks: Callable[..., Any]) -> None:
    """A row of each array would be a node, and an edge from or to one that is not there."""
    one, two, three, even = graph(0, 5, 12), graph(1, 4, 3), graph(2, 6, 9), graph(3, 5, 5)
    truth = weights_after([[together([one, three]), together([two, even]), one]], backend="local")
    given = [[one, two, one], [three, even]]  # as many edges as nodes in what is padded with
    for found in ranks(2).run(weights_after, given, data__batch="per_worker"):
        for mine, value in zip(found, truth, strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-12, atol=1e-14)


def test_one_rank_takes_all_of_a_graph() -> None:
    import tensorflow as tf

    whole = graph(0, 5, 12)
    assert not isinstance(take_slice(tf.Variable(whole[1]), 5, 0, 1), tf.Variable)
    (_, edges), y = take_slice(whole, 5, 0, 1)
    assert (len(edges), len(y)) == (12, 5)
    (_, edges), y = first_rows(whole, 1)
    assert (len(edges), len(y)) == (12, 5)
    (_, edges), y = first_rows(graph(0, 5, 5), 2)
    assert (len(edges), len(y)) == (2, 2)
    with pytest.raises(DataError, match="not examples"):
        take_slice(whole, 5, 0, 2)
