"""What a Horovod script calls: rows, objects, process sets, join and Adasum, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.dataparallel.helpers import caught, modes, started, values
from tests.dist.small import more

SIZES = [2, more(1), more(3), more(4)]


def _rows() -> dict[Any, Any]:
    import tensorflow as tf

    found: dict[Any, Any] = {}
    with started() as hvd:
        rank, size = hvd.rank(), hvd.size()
        mine = values(rank, (rank + 1, 3))  # another number of rows on each rank
        even = values(rank, (2 * size, 3), seed=2)
        splits = [(rank + k) % 3 for k in range(size)]
        sent = values(rank, (sum(splits), 2), seed=3)
        calls = {
            "allgather": lambda: hvd.allgather(mine),
            "grouped_allgather": lambda: hvd.grouped_allgather([mine, even]),
            "alltoall": lambda: hvd.alltoall(even),
            "splits": lambda: hvd.alltoall(sent, splits),
            "reducescatter": lambda: hvd.reducescatter(even, op=hvd.Sum),
            "grouped_reducescatter": lambda: hvd.grouped_reducescatter([even, even[:3]]),
            "broadcast": lambda: hvd.broadcast(tf.cast(mine[:1], "bfloat16"), size - 1),
            "scaled": lambda: hvd.allreduce(mine[0], prescale_factor=2.0, postscale_factor=0.5),
        }
        for name, call in calls.items():
            for mode, run in modes(call).items():
                found[name, mode] = [x.numpy() for x in tf.nest.flatten(run())]
        found["scalar"] = caught(lambda: hvd.allgather(1.0))
        found["uneven"] = caught(lambda: hvd.alltoall(np.ones(2 * size + 1)))
        found["object"] = hvd.broadcast_object({"rank": rank}, size - 1, name="state")
        found["objects"] = hvd.allgather_object("x" * rank)
        hvd.barrier()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_rows_and_objects(ranks: Callable[..., Any], size: int) -> None:
    mine = [values(rank, (rank + 1, 3)) for rank in range(size)]
    even = [values(rank, (2 * size, 3), seed=2) for rank in range(size)]
    splits = np.array([[(rank + k) % 3 for k in range(size)] for rank in range(size)])
    sent = [values(rank, (splits[rank].sum(), 2), seed=3) for rank in range(size)]
    pieces = [np.split(x, np.cumsum(n)[:-1]) for x, n in zip(sent, splits, strict=True)]
    halves = [np.array_split(np.mean(even, 0)[:n], size) for n in (2 * size, 3)]
    for rank, found in enumerate(ranks(size).run(_rows)):
        close = np.testing.assert_allclose
        for mode in ("eager", "traced"):
            close(found["allgather", mode][0], np.concatenate(mine))
            close(found["grouped_allgather", mode][0], np.concatenate(mine))
            close(found["grouped_allgather", mode][1], np.concatenate(even))
            rows = slice(2 * rank, 2 * rank + 2)
            close(found["alltoall", mode][0], np.concatenate([x[rows] for x in even]))
            arrived, counts = found["splits", mode]
            close(arrived, np.concatenate([piece[rank] for piece in pieces]))
            assert counts.tolist() == splits[:, rank].tolist()
            close(found["reducescatter", mode][0], np.sum(even, 0)[rows], atol=1e-12)
            for part, whole in zip(found["grouped_reducescatter", mode], halves, strict=True):
                close(part, whole[rank], atol=1e-12)
            close(found["broadcast", mode][0].astype(float), mine[-1][:1], rtol=0.01)
            if size == 1:
                close(found["scaled", mode][0], mine[0][0])
        assert "a scalar has none" in found["scalar"]
        assert size == 1 or "do not add up to its" in found["uneven"]
        assert found["object"] == {"rank": size - 1}
        assert found["objects"] == ["x" * k for k in range(size)]


def _broadcast_variables(traced: bool) -> list[np.ndarray]:
    import keras
    import tensorflow as tf

    with started() as hvd:
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)]
        )
        optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
        optimizer.build(model.trainable_variables)
        plain = tf.Variable([float(hvd.rank())])

        def send() -> None:
            hvd.broadcast_variables(model.variables, root_rank=1)
            hvd.broadcast_variables(optimizer, root_rank=1)
            hvd.broadcast_variables([plain], root_rank=1)

        (tf.function(send) if traced else send)()
        assert plain.numpy() == [1.0]
        return [v.numpy() for v in [*model.variables, *optimizer.variables]]


@pytest.mark.parametrize("traced", [False, True])
def test_variables_of_all_kinds(ranks: Callable[..., Any], traced: bool) -> None:
    first, second = ranks(2).run(_broadcast_variables, traced)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
    assert any(abs(float(x) - 0.2) < 1e-6 for x in first if x.shape == ())


def _sets() -> dict[str, Any]:
    import tensorflow as tf

    import ktrainer.dataparallel as module

    even, last = module.ProcessSet([0, 2]), module.ProcessSet([2, 1])
    found: dict[str, Any] = {"before": caught(even.size)}
    with started(process_sets=[even]) as hvd:
        rank = hvd.rank()
        hvd.add_process_set(last)  # overlaps with the other one
        found["ids"] = [
            hvd.global_process_set.process_set_id,
            even.process_set_id,
            last.process_set_id,
        ]
        found["in"] = [s.included() for s in (hvd.global_process_set, even, last)]
        found["size"] = [s.size() for s in (hvd.global_process_set, even, last)]
        for name, chosen in (("even", even), ("last", last)):
            if not chosen.included():
                found[name] = caught(partial(hvd.allreduce, 1.0, process_set=chosen))
                continue
            gathered = hvd.allgather([float(rank)], process_set=chosen).numpy().tolist()
            variable = tf.Variable(float(rank))
            hvd.broadcast_variables([variable], 2, process_set=chosen)
            with tf.GradientTape() as tape:
                loss = rank * variable
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, process_set=chosen)
            found[name] = [
                chosen.rank(),
                float(hvd.allreduce(float(rank), process_set=chosen)),
                gathered,
                float(variable),
                float(tape.gradient(loss, variable)),
                caught(partial(hvd.broadcast, 1.0, name == "even", process_set=chosen)),
            ]
        found["total"] = float(hvd.allreduce(1.0, op=hvd.Sum))
        found["again"] = caught(lambda: hvd.add_process_set([1, 2]))
        found["wrong"] = caught(lambda: hvd.add_process_set([0, 7]))
        found["different"] = caught(lambda: hvd.add_process_set([rank]))
        found["removed"] = [hvd.remove_process_set(s) for s in (even, even, hvd.global_process_set)]
        found["after"] = caught(lambda: hvd.allreduce(1.0, process_set=even))
    return found


def test_process_sets(ranks: Callable[..., Any]) -> None:
    for rank, found in enumerate(ranks(3).run(_sets)):
        assert found["before"].startswith("WorldError")
        assert found["ids"] == [0, 1, 2]
        assert found["in"] == [True, rank != 1, rank != 0]
        assert found["size"] == [3, 2, 2]
        if rank != 1:
            *numbers, error = found["even"]
            assert numbers == [rank // 2, 1.0, [0.0, 2.0], 2.0, 2.0]
            assert "is none of the ranks [0, 2]" in error
        else:
            assert "rank 1 is not in ProcessSet([0, 2])" in found["even"]
        if rank != 0:
            *numbers, error = found["last"]
            assert numbers == [rank - 1, 1.5, [1.0, 2.0], 2.0, 3.0]
        assert found["total"] == 3.0
        assert "open already" in found["again"]
        assert "different ranks from 0 to 2" in found["wrong"]
        assert "DivergenceError" in found["different"]
        assert found["removed"] == [True, False, False]
        assert "not open" in found["after"]


BATCHES = [5, 2, 3, 3]


def _joined() -> dict[str, Any]:
    import tensorflow as tf

    with started() as hvd:
        rank = hvd.rank()
        weight = tf.Variable(1.0)
        table = tf.Variable(tf.ones([3, 1]))

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = x * weight + tf.reduce_sum(tf.gather(table, [rank % 3]))
            return hvd.DistributedGradientTape(tape).gradient(loss, [weight, table])

        found: dict[str, Any] = {
            "average": [],
            "rows": [],
            "lowest": [],
            "gathered": [],
            "mean": [],
        }
        for batch in range(BATCHES[rank]):
            gradient, slices = step(tf.constant(float(10 * rank + batch)))
            found["average"].append(float(gradient))
            found["rows"].append(float(tf.reduce_sum(slices.values)))
            found["mean"].append(float(hvd.oob_allreduce(float(rank + 1))))
            found["lowest"].append(int(hvd.allreduce(rank, op=hvd.Min)))
            found["gathered"].append(hvd.allgather([rank]).numpy().tolist())
        found["last"] = hvd.join()
        found["after"] = float(hvd.allreduce(1.0, op=hvd.Sum))
        return found


@pytest.mark.parametrize("size", [2, more(3)])
def test_averages_of_ranks_that_have_not_joined(ranks: Callable[..., Any], size: int) -> None:
    for rank, found in enumerate(ranks(size).run(_joined)):
        for batch in range(BATCHES[rank]):
            active = [k for k in range(size) if BATCHES[k] > batch]
            assert found["average"][batch] == pytest.approx(
                np.mean([10 * k + batch for k in active])
            )
            assert found["rows"][batch] == pytest.approx(1)
            assert found["mean"][batch] == pytest.approx(np.mean([k + 1 for k in active]))
            assert found["lowest"][batch] == min(active)
            assert found["gathered"][batch] == active
        assert found["last"] == 0
        assert found["after"] == size


def _refused_after_join() -> tuple[list[str], int]:
    import tensorflow as tf

    with started() as hvd:
        refused = []
        if hvd.rank() == 0:
            refused = [caught(lambda: hvd.alltoall(tf.ones([2])))]
            refused += [caught(lambda: hvd.broadcast(1.0, 1))]
            assert float(hvd.broadcast(1.0, 0)) == 1.0
        return refused, hvd.join()


def test_what_cannot_run_after_a_join_is_refused(ranks: Callable[..., Any]) -> None:
    (refused, last), joined = ranks(2).run(_refused_after_join)
    assert all("rank 1 called join()" in error for error in refused)
    assert len(refused) == 2
    assert joined == ([], 0)
    assert last == 0


def _adasum() -> dict[Any, Any]:
    import tensorflow as tf

    found = {}
    with started() as hvd:
        given = [values(hvd.rank(), shape, "float64") for shape in ((4,), (2, 3), ())]
        for mode, run in modes(lambda: hvd.grouped_allreduce(given, op=hvd.Adasum)).items():
            found[mode] = [x.numpy() for x in run()]
        same = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Adasum)
        apart = hvd.allreduce(tf.one_hot(hvd.rank(), hvd.size()), op=hvd.Adasum)
        found["same"], found["apart"] = same.numpy(), apart.numpy()
        found["zero"] = hvd.allreduce(tf.constant([0.0, float(hvd.rank())]), op=hvd.Adasum).numpy()
    return found


def _by_hand(gradients: list[np.ndarray]) -> np.ndarray:
    """The paper's operator, over a tree of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    # Ranks r and r xor 1 are combined first.
    pairs = [gradients[k : k + 2] for k in range(0, len(gradients), 2)]
    combined = []
    for g1, g2 in pairs:
        dot = np.sum(g1 * g2)
        combined.append(
            (1 - dot / (2 * np.sum(g1 * g1))) * g1 + (1 - dot / (2 * np.sum(g2 * g2))) * g2
        )
    return _by_hand(combined)


@pytest.mark.parametrize("size", [2, more(4)])
def test_adasum_is_the_formula(ranks: Callable[..., Any], size: int) -> None:
    every = ranks(size).run(_adasum)
    for found in every:
        for mode in ("eager", "traced"):
            for k, shape in enumerate(((4,), (2, 3), ())):
                exact = _by_hand([values(rank, shape) for rank in range(size)])
                np.testing.assert_allclose(found[mode][k], exact, rtol=1e-12)
                assert found[mode][k].tobytes() == every[0][mode][k].tobytes()
        np.testing.assert_allclose(found["same"], [1, 2])  # parallel: averaged
        np.testing.assert_allclose(found["apart"], np.ones(size))  # orthogonal: summed


def _adasum_of_three() -> str:
    with started() as hvd:
        return caught(lambda: hvd.allreduce(1.0, op=hvd.Adasum))


def test_adasum_needs_a_power_of_two(ranks: Callable[..., Any]) -> None:
    for error in ranks(3).run(_adasum_of_three):
        assert "2, 4, 8, ... ranks; there are 3" in error
