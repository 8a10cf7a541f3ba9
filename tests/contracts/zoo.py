"""Small models that differ in everything a trainer could get wrong, each with data of its own.

`ZOO[name]` is a `Case`: a builder of a compiled model, a function that makes its data, and
whether several processes must give the numbers of one. Floats are of Keras' `floatx`, which a
test may set to float64 before it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.contracts.zoo_parts import (
    Confident,
    Distilled,
    Gan,
    Judged,
    Nested,
    NestedLogs,
    Vae,
    features_and_labels,
    features_and_marks,
    features_and_targets,
    features_labels_and_weights,
    floats,
    images,
    labels,
    logits_loss,
    sequences,
    small_mlp,
    worst_error,
)


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the compiled model.
        data: number of rows -> `(x, y)` or `(x, y, sample_weight)`.
        exact: whether data parallelism must equal one process. Dropout and other noise differ
            between ranks, and plain BatchNormalization sees smaller batches.
        class_weight: as in `Model.fit`.
    """

    build: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, ...]]
    exact: bool = True
    class_weight: Mapping[int, float] | None = None


ZOO: dict[str, Case] = {}


def case(
    data: Callable[[int], tuple[Any, ...]], **facts: Any
) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Put a builder into the zoo, under its own name."""

    def add(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        ZOO[build.__name__] = Case(build, data, **facts)
        return build

    return add


@case(features_and_labels)
def mlp() -> keras.Model:
    return small_mlp(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@case(features_and_targets)
def skip_connections() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(inputs))
    outputs = layers.Dense(2)(layers.concatenate([layers.add([inputs, hidden]), inputs]))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01, amsgrad=True), "mse", metrics=["mae", "r2_score"])
    return model


@case(images, exact=False)
def batch_norm_cnn() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    metrics = ["sparse_categorical_crossentropy", "sparse_categorical_accuracy"]
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), logits_loss(), metrics=metrics)
    return model


@case(lambda rows: (floats(rows, 8), labels(rows, 2)))
def subclassed() -> keras.Model:
    model = Nested()
    metrics = [keras.metrics.AUC(name="auc", curve="PR"), keras.metrics.Precision(name="precision")]
    optimizer = keras.optimizers.RMSprop(0.01, momentum=0.5)
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model


def two_of_each(rows: int) -> tuple[Any, ...]:
    x = {"left": floats(rows, 5), "right": floats(rows, 3, seed=1)}
    y = {"kind": labels(rows), "size": floats(rows, 1, seed=2)}
    weights = {"kind": np.abs(floats(rows, seed=3)), "size": np.abs(floats(rows, seed=4))}
    return x, y, weights


@case(two_of_each)
def two_inputs_two_outputs() -> keras.Model:
    left, right = keras.Input((5,), name="left"), keras.Input((3,), name="right")
    both = layers.Concatenate()([layers.Dense(4, activation="relu")(left), right])
    outputs = {
        "kind": layers.Dense(3, name="kind")(both),
        "size": layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        keras.optimizers.AdamW(0.01),
        loss={"kind": logits_loss(), "size": keras.losses.Huber(reduction="sum")},
        loss_weights={"kind": 1.0, "size": 0.1},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"kind": ["accuracy"], "size": []},
    )
    return model


@case(lambda rows: (sequences(rows)[0], labels(rows)), exact=False)
def transformer() -> keras.Model:
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    y = layers.MultiHeadAttention(2, 4, dropout=0.1, use_bias=False)(x, x, use_causal_mask=True)
    x = layers.add([x, layers.Dropout(0.1)(y)])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Nadam(0.01), logits_loss(), metrics=["accuracy"])
    return model


@case(sequences)
def masked_lstm() -> keras.Model:
    """Sparse gradients, and a loss whose denominator is the number of tokens that count."""
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(11, 6, mask_zero=True),
            # With a mask, TensorFlow's LSTM of cuDNN is wrong now and then: tensorflow issue 60192.
            layers.LSTM(5, return_sequences=True, use_cudnn=False),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), logits_loss(), metrics=["accuracy"])
    return model


@case(features_and_labels)
def regularised() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer="l2",
                bias_regularizer="l1",
                activity_regularizer=keras.regularizers.L1L2(1e-3, 1e-3),
                kernel_constraint=keras.constraints.MaxNorm(1.0),
            ),
            Confident(),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2)),
        ]
    )
    model.compile(keras.optimizers.Lion(0.003), logits_loss(), metrics=["accuracy"])
    return model


@case(lambda rows: (floats(rows, 8),), exact=False)
def vae() -> keras.Model:
    model = Vae()
    model.compile(keras.optimizers.Adam(0.01))
    return model


@case(lambda rows: (floats(rows, 8), floats(rows, 1, seed=1) > 0))
def own_logs() -> keras.Model:
    model = Judged()
    model.compile(keras.optimizers.Adam(0.01))
    return model


@case(lambda rows: (floats(rows, 8), floats(rows, 2, seed=1)))
def gan() -> keras.Model:
    model = Gan()
    model.compile(
        [keras.optimizers.RMSprop(0.01), keras.optimizers.Adam(0.01, beta_1=0.5, use_ema=True)]
    )
    return model


@case(features_labels_and_weights)
def sample_weights() -> keras.Model:
    model = small_mlp(keras.optimizers.Adamax(0.01))
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model.compile(model.optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


@case(features_and_labels, class_weight={0: 1.0, 1: 3.0, 2: 0.2})
def class_weights() -> keras.Model:
    model = small_mlp(keras.optimizers.Adadelta(1.0))
    model.compile(model.optimizer, logits_loss(), weighted_metrics=["accuracy"])
    return model


@case(features_and_marks)
def many_metrics() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(3, activation="sigmoid")]
    )
    metrics = [
        keras.metrics.AUC(name="roc", multi_label=True, num_labels=3),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.F1Score(average="macro", threshold=0.5, name="f1"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
    ]
    model.compile(keras.optimizers.Lamb(0.01), "binary_focal_crossentropy", metrics=metrics)
    return model


@case(images)
def synchronized_batch_norm() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, strides=2, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.05, 10, warmup_target=0.1, warmup_steps=2)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), logits_loss(), metrics=["accuracy"])
    return model


@case(features_and_targets)
def averaged_weights() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(6, "elu"), layers.Dense(2)])
    optimizer = keras.optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4, weight_decay=0.01
    )
    model.compile(optimizer, keras.losses.LogCosh(), metrics=["mse"])
    return model


@case(features_and_labels)
def clipped() -> keras.Model:
    return small_mlp(keras.optimizers.Ftrl(0.1, global_clipnorm=0.05))


@case(features_and_targets)
def own_loss_and_metrics() -> keras.Model:
    model = Distilled()
    model.build((None, 8))
    optimizer = keras.optimizers.Adafactor(0.01, clipnorm=0.5)
    model.compile(optimizer, worst_error, metrics=[worst_error, "cosine_similarity"])
    return model


@case(features_and_targets)
def nested_logs() -> keras.Model:
    model = NestedLogs()
    m = (
        keras.metrics
    )  # History has them in the order of their names, also where Keras has inner ones
    metrics = [m.MeanAbsoluteError(name="absolute"), m.MeanSquaredError(name="another")]
    model.compile(keras.optimizers.SGD(0.05), metrics=metrics)
    return model


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, clipnorm=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lion": lambda: keras.optimizers.Lion(0.003),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "loss_scaled": lambda: keras.optimizers.SGD(0.05, loss_scale_factor=1024.0),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "decaying": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # from Keras 3.15
    OPTIMIZERS["multiple"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.01), {".*/bias": keras.optimizers.SGD(0.1)}
        )
    )
