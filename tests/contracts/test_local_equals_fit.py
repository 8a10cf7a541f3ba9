"""On one process, training equals `Model.fit`: History, weights, slots, seeds, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Trainer
from tests.contracts import zoo
from tests.contracts.running import (
    BATCH,
    EPOCHS,
    ROWS,
    SEED,
    VALIDATION_ROWS,
    assert_same,
    config,
    local,
    outcome_of,
    use_float64,
    with_keras,
    with_ktrainer,
)
from tests.contracts.zoo import OPTIMIZERS, ZOO


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("name", ZOO)
def test_every_model(name: str) -> None:
    ours = local(name)  # in float64, and kept for the tests of other backends
    use_float64()
    assert_same(ours, with_keras(ZOO[name]))


@pytest.mark.quick("sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    def build() -> keras.Model:
        model = zoo.small_mlp(OPTIMIZERS[name]())
        if name == "schedule_free":  # Model.fit loses its first momentum, but for an eager build
            model.optimizer.build(model.trainable_variables)
        return model

    case = replace(ZOO["mlp"], build=build)
    assert_same(with_ktrainer(case, validate=False), with_keras(case, validate=False))


@dataclass(frozen=True)
class Kind:
    """The same data twice, for Keras and for us, and the arguments that go with it."""

    make: Callable[[], Any]
    validation: Callable[[], Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # of Model.fit
    trainer: dict[str, Any] = field(default_factory=dict)  # our settings for the same
    class_weight: dict[int, float] | None = None
    build: Callable[[], keras.Model] = ZOO["mlp"].build
    length_known: bool = True


def dataset(rows: int = ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(zoo.features_and_labels(rows))


def batches(rows: int = ROWS) -> Iterator[tuple[np.ndarray, ...]]:
    x, y = zoo.features_and_labels(rows)
    for start in range(0, rows, BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def endless() -> Iterator[tuple[np.ndarray, ...]]:
    while True:
        yield from batches()


def unknown_length() -> tf.data.Dataset:
    return dataset().filter(lambda x, y: x[0] > -1.0).batch(BATCH)


class Reordering(keras.utils.PyDataset):
    """Draws a new order after every epoch, as many do."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.data = (zoo.features_labels_and_weights if weighted else zoo.features_and_labels)(ROWS)
        self.random = np.random.default_rng(0)
        self.order = np.arange(ROWS)

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return tuple(part[rows] for part in self.data)

    def on_epoch_end(self) -> None:
        self.order = self.random.permutation(ROWS)


def padded(rows: int = ROWS) -> tf.data.Dataset:
    """Sequences padded to the longest of their batch: a dimension that varies."""
    x, y = zoo.sequences(rows)
    lengths = (x != 0).sum(1)
    signature = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int32))
    cut = ((a[:n], b[:n]) for a, b, n in zip(x, y, lengths, strict=True))
    sequences = list(cut)
    dataset = tf.data.Dataset.from_generator(lambda: sequences, output_signature=signature)
    return dataset.padded_batch(BATCH)


def tagger() -> keras.Model:
    embedding = layers.Embedding(11, 4, mask_zero=True)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), zoo.logits_loss(), metrics=["accuracy"])
    return model


KINDS = {
    "dataset": Kind(lambda: dataset().batch(BATCH), lambda: dataset(VALIDATION_ROWS).batch(BATCH)),
    "shuffled dataset": Kind(lambda: dataset().shuffle(ROWS, seed=3).batch(BATCH)),
    "dataset of unknown length": Kind(unknown_length, unknown_length, length_known=False),
    "endless dataset": Kind(
        lambda: dataset().repeat().batch(BATCH),
        arguments={"steps_per_epoch": 4},
        trainer={"limit_train_batches": 4},
    ),
    "dataset with class weights": Kind(
        lambda: dataset().batch(BATCH), class_weight={0: 0.5, 1: 1.0, 2: 4.0}
    ),
    "sequences of varying length": Kind(padded, padded, build=tagger, length_known=False),
    "PyDataset": Kind(Reordering, Reordering),
    "PyDataset with class weights": Kind(Reordering, class_weight={0: 0.5, 1: 1.0, 2: 4.0}),
    "weighted PyDataset": Kind(lambda: Reordering(weighted=True)),
    "endless generator": Kind(
        endless,
        lambda: dataset(VALIDATION_ROWS).batch(BATCH),
        arguments={"steps_per_epoch": 2},
        trainer={"limit_train_batches": 2},
    ),
    "generator for one epoch": Kind(
        batches,
        lambda: batches(VALIDATION_ROWS),
        arguments={"epochs": 1},
        trainer={"epochs": 1},
        length_known=False,
    ),
}


# Model.fit says so whenever it learns a length by coming to the end, one batch too late.
@pytest.mark.quick("weighted PyDataset")
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_data(name: str) -> None:
    kind = KINDS[name]
    keras.utils.set_random_seed(SEED)
    model = kind.build()
    validation = kind.validation() if kind.validation else None
    history = model.fit(
        kind.make(),
        validation_data=validation,
        class_weight=kind.class_weight,
        shuffle=False,
        verbose=0,
        **{"epochs": EPOCHS, **kind.arguments},
    )
    theirs = outcome_of(model, history)
    with Trainer(config(trainer={"epochs": EPOCHS, **kind.trainer})) as trainer:
        keras.utils.set_random_seed(SEED)
        validation = kind.validation() if kind.validation else None
        history = trainer.fit(
            kind.build(),
            kind.make(),
            validation_data=validation,
            class_weight=kind.class_weight,
        )
        ours = outcome_of(trainer.model, history)
    if not kind.length_known:
        # Model.fit runs a step without data at the end, which counts as an update.
        for outcome in (ours, theirs):
            outcome.slots = [slot for slot in outcome.slots if "iteration" not in slot[0]]
    assert_same(ours, theirs)


def test_a_second_fit_continues_the_first() -> None:
    x, y = zoo.features_and_labels(ROWS)
    keras.utils.set_random_seed(SEED)
    model = zoo.mlp()
    for _ in range(2):
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    theirs = outcome_of(model, history)
    with Trainer(config()) as trainer:
        keras.utils.set_random_seed(SEED)
        model = zoo.mlp()
        for _ in range(2):
            history = trainer.fit(model, (x, y))
        assert_same(outcome_of(model, history), theirs)


def test_fit_after_keras_fit_and_before_it() -> None:
    """Both leave a model that the other can go on with."""
    x, y = zoo.features_and_labels(ROWS)
    arguments = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    outcomes = []
    with Trainer(config()) as trainer:
        for order in ("keras keras", "keras ours", "ours keras"):
            keras.utils.set_random_seed(SEED)
            model = zoo.mlp()
            for who in order.split():
                theirs = who == "keras"
                history = model.fit(x, y, **arguments) if theirs else trainer.fit(model, (x, y))
            outcomes.append(outcome_of(model, history))
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    theirs = with_keras(ZOO["mlp"])
    keras.config.set_dtype_policy("float32")
    assert_same(with_ktrainer(ZOO["mlp"], trainer={"epochs": EPOCHS, "precision": policy}), theirs)


def test_run_eagerly() -> None:
    def build() -> keras.Model:
        model = zoo.mlp()
        model.run_eagerly = True
        return model

    case = replace(ZOO["mlp"], build=build)
    assert_same(with_ktrainer(case), with_keras(case))
