"""One case of benchmarks/elsewhere.py in this process, which may be one of two ranks.

    python benchmarks/elsewhere_cases.py CASE keras|mirrored|horovod|ktrainer FOLDER

What the process finds is written to FOLDER/rank0.json, or rank1.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly
from ktrainer.distributed import open_world

# isort: split
import keras
import numpy as np
import tensorflow as tf
from keras import layers

HANG_SECONDS = 20.0
ALL_CASES: dict[str, Callable[[str], dict[str, Any]]] = {}


def main() -> None:
    name, how, folder = sys.argv[1:]
    rank = open_world().rank if how in ("horovod", "ktrainer") else 0
    path = Path(folder, f"rank{rank}.json")
    if name == "uneven_ranks" and how == "horovod":
        result = horovod_with_uneven_ranks(path)
    elif name in FIT:
        result = fit_case(FIT[name], how)
    else:
        result = ALL_CASES[name](how)
    path.write_text(json.dumps(result))


# -- one model, one data set, three ways to fit it


def blobs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(seed).randn(count, 8).astype("float32")
    y = (x @ np.random.RandomState(99).randn(8, 4)).argmax(1).astype("int32")
    return x, y


def classifier(optimizer: Callable[[], Any], *extra: Callable[[], Any], seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    hidden = [layers.Dense(16, activation="tanh"), *(layer() for layer in extra)]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, jit_compile=False)
    return model


@dataclass(frozen=True)
class Case:
    model: Callable[[], Any]
    data: Callable[[], tuple[np.ndarray, np.ndarray]]
    batch_size: int = 32
    found: Callable[[Any], dict[str, Any]] = lambda model: {}


def sgd(**settings: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.SGD(**{"learning_rate": 1.0, **settings})


def synchronized() -> Any:
    return layers.BatchNormalization(synchronized=True)


def batch_norm_model() -> Any:
    return classifier(sgd_slow, layers.BatchNormalization)


def predictions(model: Any) -> dict[str, Any]:
    """Those of a fresh model with the trained weights, as after loading them from a file."""
    fresh = batch_norm_model()
    fresh.set_weights(model.get_weights())
    return {"predictions": flat([fresh.predict_on_batch(blobs(8)[0])]).tolist()}


def dropout_model() -> Any:
    """The first update of each weight counts the examples for which its unit was kept."""
    keras.utils.set_random_seed(1)
    output = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1000,)), layers.Dropout(0.5), output])
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: -tf.reduce_mean(p, -1), jit_compile=False)
    return model


def dropped_once(model: Any) -> dict[str, Any]:
    kept = np.round(flat(model.get_weights()))  # each kept unit counts 2 * 1/2
    return {"one_of_two": float(np.mean(kept == 1))}


def sgd_slow() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


FIT = {
    "global_clipnorm": Case(lambda: classifier(sgd(global_clipnorm=0.1)), lambda: blobs(32)),
    "clipvalue": Case(lambda: classifier(sgd(clipvalue=0.01)), lambda: blobs(32)),
    "uneven_batch": Case(lambda: classifier(sgd_slow), lambda: blobs(241)),
    "batch_of_one": Case(lambda: classifier(sgd_slow), lambda: blobs(225)),
    "synchronized_of_one": Case(lambda: classifier(sgd_slow, synchronized), lambda: blobs(225)),
    "batch_norm_of_one": Case(batch_norm_model, lambda: blobs(225), found=predictions),
    "dropout": Case(
        dropout_model,
        lambda: (np.ones((2, 1000), "float32"), np.zeros((2, 1), "float32")),
        batch_size=2,
        found=dropped_once,
    ),
}


def fit_case(case: Case, how: str) -> dict[str, Any]:
    if how == "ktrainer":
        trainer = trainer_for({"batch_size": case.batch_size})
        model = case.model()
        before = flat(model.get_weights())
        trainer.fit(model, case.data())
        trainer.close()
    else:
        with two_devices().scope() if how == "mirrored" else tf.name_scope(""):
            model = case.model()
            before = flat(model.get_weights())
            batches = tf.data.Dataset.from_tensor_slices(case.data()).batch(case.batch_size)
            model.fit(batches, shuffle=False, verbose=0)
    return {
        "before": before.tolist(),
        "weights": flat(model.get_weights()).tolist(),
        **case.found(model),
    }


def two_devices() -> Any:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(a).astype("float64") for a in arrays])


def trainer_for(data: dict[str, Any]) -> Trainer:
    return Trainer(
        {
            "backend": "data_parallel",
            "data": {"shuffle": False, **data},
            "logging": {"progress": "none", "csv": False},
            "run": {"dir": str(Path(sys.argv[3], "run"))},
            "world": {"deadline": 60.0},
        }
    )


# -- ranks with data, weights or metrics of their own


def case(function: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    ALL_CASES[function.__name__] = function
    return function


def own_batches(rank: int, count: int = 4) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(blobs(32 * count, seed=rank)).batch(32)


@case
def optimizer(how: str) -> dict[str, Any]:
    rank = open_world().rank
    if how == "horovod":
        import horovod.tensorflow.keras as hvd

        hvd.init()
        model = classifier(lambda: hvd.DistributedOptimizer(sgd_slow()))
        model.fit(own_batches(rank), verbose=0)
    else:
        model = classifier(sgd_slow)
        trainer_for({"batch": "per_worker"}).fit(model, own_batches(rank))
    return {"weights": flat(model.get_weights()).tolist()}


@case
def broadcast(how: str) -> dict[str, Any]:
    rank = open_world().rank
    model = classifier(lambda: keras.optimizers.SGD(0.0), seed=rank + 1)
    if how == "ktrainer":
        trainer_for({"batch": "per_worker"}).fit(model, own_batches(rank))
    else:
        import horovod.tensorflow.keras as hvd

        hvd.init()
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        try:
            model.fit(own_batches(rank), verbose=0, callbacks=[callback])
        except Exception as error:
            return {"error": f"`{type(error).__name__}: {error}`"}
    return {"weights": flat(model.get_weights()).tolist()}


@case
def auc(how: str) -> dict[str, Any]:
    """Two halves of a data set that are not alike: 1 in 10 positives, then 1 in 2."""
    random = np.random.RandomState(0)
    y = (random.rand(512) < np.repeat([0.1, 0.5], 256)).astype("float32")
    x = (y + random.randn(512) + np.repeat([0.0, 1.0], 256)).astype("float32")[:, None]
    output = layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), output])
    metrics = [keras.metrics.AUC(name="auc")]
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(optimizer, "binary_crossentropy", metrics=metrics, jit_compile=False)
    if how == "keras":
        return {"auc": last_auc(model.fit(x, y, batch_size=64, verbose=0))}
    rank = open_world().rank
    mine = slice(256 * rank, 256 * (rank + 1))
    half = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(32)
    if how == "ktrainer":
        return {"auc": last_auc(trainer_for({"batch": "per_worker"}).fit(model, half))}
    import horovod.tensorflow.keras as hvd

    hvd.init()
    average = hvd.callbacks.MetricAverageCallback()
    try:
        return {"auc": last_auc(model.fit(half, callbacks=[average], verbose=0))}
    except AttributeError as error:
        by_hand = hvd.allreduce(last_auc(model.fit(half, verbose=0)), name="auc")
        return {"auc": float(by_hand), "error": f"`{type(error).__name__}: {error}`"}


def last_auc(history: keras.callbacks.History) -> float:
    return float(history.history["auc"][-1])


@case
def uneven_ranks(how: str) -> dict[str, Any]:
    rank = open_world().rank
    trainer_for({"batch": "per_worker"}).fit(classifier(sgd_slow), own_batches(rank, 4 + rank))
    return {}


@case
def unknown_length(how: str) -> dict[str, Any]:
    """Three epochs of a dataset whose length is unknown until it ends."""
    model = classifier(sgd_slow)
    batches = own_batches(0, 8).filter(lambda x, y: True)  # TensorFlow cannot count these
    if how == "keras":
        model.fit(batches, epochs=3, verbose=0)
    else:
        trainer_for({}).fit(model, batches, epochs=3)
    return {"iterations": int(model.optimizer.iterations)}


def horovod_with_uneven_ranks(path: Path) -> dict[str, Any]:
    """The loop of Horovod's documentation, on data that one rank has more of."""
    import horovod.tensorflow as hvd

    hvd.init()
    model = classifier(sgd_slow)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    waiting = {"hung": HANG_SECONDS}

    def give_up() -> None:
        path.with_name("rank0.json").write_text(json.dumps(waiting))
        os._exit(0)

    for batch, (x, y) in enumerate(own_batches(hvd.rank(), 4 + hvd.rank())):
        if batch == 4:  # the other rank has finished
            threading.Timer(HANG_SECONDS, give_up).start()
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = [v.value for v in model.trainable_variables]
        gradients = [hvd.allreduce(g) for g in tape.gradient(value, variables)]
        model.optimizer.apply(gradients, model.trainable_variables)
    if hvd.rank() == 0:
        threading.Event().wait()  # a real script would then save, or validate
    return {}


if __name__ == "__main__":
    main()
