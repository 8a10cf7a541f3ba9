"""`backend.local_layers`: each rank's own layers equal the copies of a model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Trainer
from ktrainer.checkpoint import read_checkpoint
from ktrainer.errors import CheckpointError, DivergenceError
from tests.contracts.running import use_float64
from tests.dist.small import group_mode

ROWS, BATCH, EPOCHS = 25, 6, 2  # the last batch has one row: other ranks have none
LOCAL = ("table", "own/.*", "top/kernel")
QUIET: dict[str, Any] = {
    "logging": {"progress": "none", "csv": False},
    "data": {"shuffle": False, "batch_size": BATCH},
    "health": {"audit_every": "1ba", "verify": "off"},
}
Arrays = tuple[np.ndarray, ...]


def data(rows: int = ROWS) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    x = {"ids": random.integers(0, 5, (rows, 2)), "x": random.normal(size=(rows, 3))}
    return x, random.normal(size=(rows, 1))


def parts(rank: int) -> dict[str, Any]:
    """The layers of one copy, each with values of its own."""

    def values(seed: int) -> Any:
        return keras.initializers.RandomNormal(seed=100 * rank + seed)

    norm = layers.BatchNormalization(momentum=0.7, name="norm")
    wide = layers.Dense(3, kernel_initializer=values(2), name="wide")
    return {
        "table": layers.Embedding(5, 2, embeddings_initializer=values(1), name="table"),
        "body": layers.Dense(4, "tanh", kernel_initializer=values(3), name="body"),
        "own": keras.Sequential([keras.Input((4,)), norm, wide], name="own"),
        "top": layers.Dense(1, kernel_initializer=values(4), name="top"),
    }


def connected(made: dict[str, Any]) -> keras.Model:
    ids, x = keras.Input((2,), name="ids", dtype="int64"), keras.Input((3,), name="x")
    found = layers.Flatten()(made["table"](ids))
    hidden = made["body"](layers.Concatenate()([found, x]))
    return keras.Model({"ids": ids, "x": x}, made["top"](made["own"](hidden)))


def build(rank: int) -> keras.Model:
    model = connected(parts(0))
    model.set_weights(connected(parts(rank)).get_weights())  # others to begin with, all of them
    model.compile(keras.optimizers.Adam(0.05, name="adam"), "mse")
    return model


def is_own(path: str) -> bool:
    return path.startswith(("table", "norm", "wide", "own", "top/kernel"))


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    found = {v.path: np.array(v.numpy()) for v in model.variables}
    return found | {v.path: np.array(v.numpy()) for v in model.optimizer.variables}


# -- the same in one process: the copies share what is not local


class Twin:
    """Copies of a model in one process, whose shared layers are the same variables."""

    def __init__(self, size: int) -> None:
        made = [parts(rank) for rank in range(size)]
        self.copies = [connected(each) for each in made]
        for copy in self.copies[1:]:
            for mine, first in zip(copy.variables, self.copies[0].variables, strict=True):
                if not is_own(first.path):
                    mine.assign(first.numpy())
        self.optimizers = [keras.optimizers.Adam(0.05, name="adam") for _ in self.copies]
        for optimizer, copy in zip(self.optimizers, self.copies, strict=True):
            optimizer.build(copy.trainable_variables)

    def update(self, batches: list[tuple[dict[str, np.ndarray], np.ndarray]]) -> float:
        """One update; the loss of its last batch."""
        size, total = len(self.copies), sum(len(y) for _, y in batches)
        sums: list[list[Any]] = [[None] * len(c.trainable_variables) for c in self.copies]
        for x, y in batches:
            loss_of_batch = 0.0
            rows = np.array_split(np.arange(len(y)), size)
            for copy, kept, mine in zip(self.copies, sums, rows, strict=True):
                if not len(mine):
                    continue
                with tf.GradientTape() as tape:
                    output = copy({k: v[mine] for k, v in x.items()}, training=True)
                    loss = tf.reduce_sum(tf.square(output - y[mine])) / total
                loss_of_batch += float(loss) * total / len(y)
                for k, g in enumerate(tape.gradient(loss, copy.trainable_variables)):
                    kept[k] = g if kept[k] is None else plus(kept[k], g)
        for k, variable in enumerate(self.copies[0].trainable_variables):
            present = [kept[k] for kept in sums if kept[k] is not None]
            for kept in sums:
                if not is_own(variable.path):
                    kept[k] = tf.add_n(present)
                elif kept[k] is None:
                    kept[k] = tf.zeros(variable.shape, variable.dtype)
        for optimizer, copy, kept in zip(self.optimizers, self.copies, sums, strict=True):
            optimizer.apply(kept, copy.trainable_variables)
        return loss_of_batch

    def values(self, rank: int) -> dict[str, np.ndarray]:
        copy, optimizer = self.copies[rank], self.optimizers[rank]
        found = {v.path: np.array(v.numpy()) for v in copy.variables}
        return found | {v.path: np.array(v.numpy()) for v in optimizer.variables}


def plus(a: Any, b: Any) -> Any:
    if isinstance(a, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return a + b


def batches_of(rows: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    x, y = data(rows)
    for start in range(0, rows, BATCH):
        part = slice(start, start + BATCH)
        yield {k: v[part] for k, v in x.items()}, y[part]


def train(engine: str = "mpi", **settings: Any) -> dict[str, Any]:
    use_float64()
    keras.utils.clear_session()
    words = [f"{k.replace('__', '.')}={v}" for k, v in settings.items()]
    words += ["backend=data_parallel", f"backend.engine={engine}", f"trainer.epochs={EPOCHS}"]
    words += [f"backend.local_layers={list(LOCAL)}".replace("'", '"')]
    with Trainer(QUIET | {"checkpoint": {"resume": "never"}}, overrides=words) as trainer:
        model = build(trainer.world.rank)
        history = trainer.fit(model, *data()).history
        logs = trainer.evaluate(model, *data())
        return {"values": values_of(model), "loss": history["loss"], "evaluated": logs["loss"]}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"trainer__accumulate": 2},
    "several": {"trainer__steps_per_call": 2},
    "xla": {"trainer__xla": True},
}


@pytest.mark.quick("mpi-plain-2")
@pytest.mark.parametrize(
    ("engine", "case", "size"),
    [
        *(("mpi", case, 2) for case in CASES),
        ("mpi", "plain", 3),
        pytest.param("horovod", "plain", 2, marks=pytest.mark.horovod),
    ],
)
def test_ranks_equal_copies_in_one_process(
    ranks: Callable[..., Any], size: int, case: str, engine: str
) -> None:
    found = ranks(size, group_mode(engine)).run(train, engine, **CASES[case])
    use_float64()
    keras.utils.clear_session()
    twin, each = Twin(size), CASES[case].get("trainer__accumulate", 1)
    for _ in range(EPOCHS):
        batches = list(batches_of(ROWS))
        for at in range(0, len(batches), each):
            twin.update(batches[at : at + each])
    for rank, result in enumerate(found):
        expected = twin.values(rank)
        assert list(result["values"]) == list(expected)
        for path, value in expected.items():
            np.testing.assert_allclose(
                result["values"][path], value, rtol=1e-10, atol=1e-12, err_msg=f"{rank}: {path}"
            )
    own = found[0]["values"]["top/kernel"], found[1]["values"]["top/kernel"]
    assert np.abs(own[0] - own[1]).max() > 1e-3
    assert len({str(result["loss"]) for result in found}) == 1


# -- checkpoints


def run_in(folder: str, steps: int | None = None, **settings: Any) -> dict[str, Any]:
    """Train in a folder of checkpoints, or resume; all values, and the best weights so far."""
    use_float64()
    keras.utils.clear_session()
    words = [f"{k.replace('__', '.')}={v}" for k, v in settings.items()]
    words += [f"checkpoint.dir={folder}", "checkpoint.every=1ba", "trainer.epochs=2"]
    words += [] if steps is None else [f"trainer.max_steps={steps}"]
    local = {"backend": {"name": "data_parallel", "local_layers": list(LOCAL)}}
    with Trainer(QUIET | local, overrides=words) as trainer:
        callbacks = [keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)]
        model = build(trainer.world.rank)
        history = trainer.fit(model, *data(), callbacks=callbacks).history
        best = [np.array(w) for w in callbacks[0].best_weights or ()]
        trainer.save(f"{folder}/whole.keras")
        return {"values": values_of(model), "history": history, "best": best}


def error_in(folder: str, **settings: Any) -> str:
    try:
        run_in(folder, **settings)
    except (CheckpointError, DivergenceError) as error:
        return str(error)
    return "none"


def same(found: Any, expected: Any) -> None:
    for one, two in zip(found, expected, strict=True):
        assert one["history"] == two["history"]
        for path, value in two["values"].items():
            np.testing.assert_array_equal(one["values"][path], value, err_msg=path)
        for best, wanted in zip(one["best"], two["best"], strict=True):
            np.testing.assert_array_equal(best, wanted)


def test_each_rank_resumes_with_its_own_to_the_bit(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    group = ranks(2)
    expected = group.run(run_in, whole)
    group.run(run_in, cut, steps=7)  # in the second epoch
    same(group.run(run_in, cut), expected)
    top = [result["values"]["top/kernel"] for result in expected]
    assert np.abs(top[0] - top[1]).max() > 1e-3
    assert all(result["best"] for result in expected)
    # Each rank's own are in the file, and what all share once.
    newest = sorted((tmp_path / "whole").glob("step-*"))[-1]
    arrays, state = read_checkpoint(newest)
    for rank, result in enumerate(expected):
        np.testing.assert_array_equal(
            arrays[f"model/top/kernel@{rank}"], result["values"]["top/kernel"]
        )
    assert "model/body/kernel" in arrays
    assert "model/top/kernel" in state["local"]
    assert not any("body" in name for name in state["local"])
    assert sum("top_kernel" in name for name in arrays) == 4  # Adam's two slots
    # `trainer.save` has rank 0's.
    saved = keras.models.load_model(tmp_path / "whole" / "whole.keras")  # not of the package
    np.testing.assert_array_equal(saved.get_layer("top").kernel, top[0])
    # Another number of ranks, or none that are local, is refused.
    assert "of 2 ranks, and there are 1" in error_in(whole)
    shared = group.run(error_in, whole, backend__local_layers="[]")
    assert all("name it in backend.local_layers" in text for text in shared)
