"""Batches that are copied to the device ahead of the step: where, when, and what a resume reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.data import Examples, Feed
from tests.data.feeds import feed, numbered
from tests.tf_distribute.running import ONE_PROCESS, make_devices

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:1"
ROWS, BATCH = 44, 4
WIDE = 1 << 12  # columns: arrays of few bytes are not made ahead


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = numbered(ROWS, WIDE)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


class Rows:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(WIDE, index, np.float32), index


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return (Sequence()[i] for i in range(ROWS // BATCH))


def pipeline(known: bool = True) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(numbered(ROWS, WIDE)).shuffle(20, seed=3)
    return (data if known else data.filter(lambda x, y: True)).batch(BATCH)


def composite() -> tf.data.Dataset:
    """Ragged, sparse and text parts, none of which is copied, beside numbers."""
    data = {
        "number": np.arange(ROWS, dtype=np.float32),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(2 * ROWS), [2] * ROWS),
        "sparse": tf.sparse.from_dense(np.eye(ROWS)),
        "text": [str(i) for i in range(ROWS)],
    }
    return (
        tf.data.Dataset.from_tensor_slices((data, np.arange(ROWS))).shuffle(9, seed=4).batch(BATCH)
    )


DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: numbered(ROWS, WIDE),
    "examples": lambda: Examples(Rows()),
    "dataset": pipeline,
    "PyDataset": Sequence,
    "generator": lambda: batches,
}


def numbers(local_batches: Any) -> list[list[int]]:
    return [np.asarray(local.batch[1]).tolist() for local in local_batches]


def ahead_of(made: Feed) -> list[Any]:
    """The first inputs of the batches that wait on the device."""
    source = getattr(made, "source", made)
    prefetcher = getattr(source, "_ahead", None)
    prefetcher = prefetcher if hasattr(prefetcher, "pending") else source._prefetcher
    waiting = prefetcher.pending(30)
    batches = [getattr(item, "batch", item) for item in waiting]
    return [batch[0] for batch in batches]


def copied_ahead(kind: str) -> tuple[list[str], list[str], bool]:
    """Devices of the batches taken, and of those that wait meanwhile; whether all are right."""
    make_devices()
    options = {"batch_size": BATCH, "shuffle": kind != "PyDataset"}
    plain = feed(DATA[kind](), **options)
    made = feed(DATA[kind](), device="CPU:1", **options)
    with closing(plain), closing(made):
        taken, waiting, found = [], [], []
        for local in made.epoch(0):
            if not found:
                waiting = [x.device for x in ahead_of(made)]
            taken.append(local.batch[0].device)
            found.append(local)
        return taken, waiting, numbers(found) == numbers(plain.epoch(0))


@pytest.mark.quick("arrays", "dataset", "generator")
@pytest.mark.parametrize("kind", DATA)
def test_the_next_two_batches_are_on_the_device_while_one_is_used(ranks: Any, kind: str) -> None:
    ((taken, waiting, equal),) = ranks(1, ONE_PROCESS).run(copied_ahead, kind)
    assert equal
    assert set(taken) == {DEVICE}
    assert waiting == [DEVICE] * 2


def first_of(value: Any) -> Any:
    return np.asarray(value.to_tensor() if isinstance(value, tf.RaggedTensor) else value)


def flat(local_batches: Any) -> list[np.ndarray]:
    """All parts of batches, as dense arrays."""
    leaves = [leaf for local in local_batches for leaf in tf.nest.flatten(local.batch)]
    dense = [tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x for x in leaves]
    return [first_of(each) for each in dense]


def resumed(make: Callable[[], Any], devices: tuple[str | None, str | None], size: int) -> bool:
    """Whether a feed that resumes from the state of another gives the rest, also the second time,
    and when the first one was closed before."""
    make_devices()
    with closing(feed(make(), 0, size)) as whole:
        expected = [flat(whole.epoch(0)), flat(whole.epoch(1))]
    parts = len(expected[0]) // (ROWS // BATCH)
    for taken in (1, 3, 10):
        state = None
        for skip in (taken, taken + 1):
            made = feed(make(), 0, size, device=devices[skip != taken])
            with closing(made):
                if state is not None:
                    made.resume_from(state)
                reader = made.epoch(0, skip=taken if state is not None else 0)
                for _ in range(1 if state is not None else taken):
                    next(reader)
                if taken == 3:
                    reader.close()  # as before a checkpoint that ends the run
                state = made.state(True)
                assert state is not None
        made = feed(make(), 0, size, device=devices[1])
        with closing(made):
            made.resume_from(state)
            left = flat(made.epoch(0, skip=taken + 1))
            assert len(left) == len(expected[0]) - (taken + 1) * parts
            for ours, truth in zip(left, expected[0][(taken + 1) * parts :], strict=True):
                np.testing.assert_array_equal(ours, truth)
            for ours, truth in zip(flat(made.epoch(1)), expected[1], strict=True):
                np.testing.assert_array_equal(ours, truth)
    return True


@pytest.mark.quick("1-devices0-composite", "2-devices1-pipeline")
@pytest.mark.parametrize(
    ("size", "devices", "make"),
    [
        (1, ("CPU:1", "CPU:1"), composite),
        (2, ("CPU:1", None), pipeline),
        (1, (None, "CPU:1"), pipeline),
        (2, (None, "CPU:1"), composite),
    ],
)
def test_a_resume_reads_what_was_copied_ahead(
    ranks: Any, make: Any, devices: Any, size: int
) -> None:
    assert ranks(1, ONE_PROCESS).run(resumed, make, devices, size, deadline=120) == [True]


def fitted(folder: str, device: str | None, ends: tuple[int, ...], words: list[str]) -> Any:
    """Weights and losses of a run that stops after each of `ends` updates and resumes."""
    if device == DEVICE:
        make_devices()
    x, y = numbered(ROWS, 6)
    with (
        patch("ktrainer.backends.backend.accelerator", lambda: device),
        patch("ktrainer.backends.pipeline.backend.accelerator", lambda: device),
    ):
        for end in (*ends, None):
            keras.utils.clear_session()
            keras.utils.set_random_seed(1)
            data = tf.data.Dataset.from_tensor_slices((x / ROWS, y / ROWS)).shuffle(30, seed=2)
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile(keras.optimizers.Adam(0.01), "mse")
            settings = [f"run.dir={folder}", "checkpoint.every=1ba", "logging.progress=none"]
            settings += ["trainer.epochs=2", *words, f"trainer.max_steps={end or 'null'}"]
            with Trainer(overrides=settings) as trainer:
                history = trainer.fit(model, data.batch(BATCH), validation_data=(x / ROWS, y))
                cut = trainer.backend.name == "pipeline"
                weights = [] if cut else [v.numpy() for v in model.weights]
    return weights, history.history


@pytest.mark.quick
@pytest.mark.parametrize(
    "words", [["trainer.accumulate=2"], ["trainer.steps_per_call=3", "data.shuffle=false"]]
)
def test_a_fit_in_parts_is_the_whole_one_to_the_bit(
    ranks: Any, tmp_path: Path, words: list[str]
) -> None:
    group = ranks(1, ONE_PROCESS)
    (truth,) = group.run(fitted, str(tmp_path / "a"), None, (), words)
    (parts,) = group.run(fitted, str(tmp_path / "b"), DEVICE, (2, 4), words, deadline=120)
    for ours, expected in zip(parts[0], truth[0], strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert parts[1] == truth[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words", [["backend=data_parallel"], ["backend=pipeline", "backend.partitions=2"]]
)
def test_ranks_resume_to_the_bit(ranks: Any, tmp_path: Path, words: list[str]) -> None:
    truth = ranks(2).run(fitted, str(tmp_path / "a"), None, (), words, deadline=120)
    parts = ranks(2).run(fitted, str(tmp_path / "b"), "CPU:0", (3, 15), words, deadline=120)
    assert parts[0][1] == truth[0][1]
