"""What the coordinator of a cluster with parameter servers does in `test_servers`.

`ktrainer run --workers 2 --servers 2 servers_script.py FOLDER PART` writes what it found to
FOLDER/found.json. Workers and servers come as far as the first Trainer.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ktrainer import Trainer

# isort: split
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tests.contracts import running, stock_callbacks
from tests.contracts.test_backends import compare as compare_zoo
from tests.dist import losses
from tests.dist.cases import CASES, difference, several, with_optimizers
from tests.dist.harness import keras_state
from tests.dist.test_ragged_outputs import predicted
from tests.loops.cases import CASES as LOOPS
from tests.loops.cases import largest_difference, outcomes
from tests.tf_distribute.running import make_devices
from tests.tf_distribute.test_features import half_precision

FOLDER = Path(sys.argv[1])
QUIET = {"logging": {"progress": "none", "csv": False}}
SERVERS = ["backend=tf_distribute", "backend.strategy=parameter_server"]
MODELS = ["batch_norm_cnn", "gan", "many_metrics", "averaged_weights", "own_loss_and_metrics"]
MODELS += ["nested_logs"]  # noise, too, is that of one process
LIKE_OTHERS = ("class_weights", "clipped_by_config", "masked_accumulated", "positions")  # and slow
IN_STEP = {"name": "tf_distribute", "strategy": "parameter_server", "join": "step"}


def main() -> None:
    os.chdir(FOLDER)
    make_devices()  # as tests of other strategies have them
    trainer(join="step").close()  # a worker or server does not return from here
    found = {"joined": joined, "contracts": contracts, "loops": loops}[sys.argv[2]]()
    (FOLDER / "found.json").write_text(json.dumps(found))


def joined() -> dict[str, Any]:
    """Trainings that must equal one process, and an asynchronous one."""
    found: dict[str, Any] = {"cases": {}, "logs": {}}
    references: dict[str, Any] = {}
    for case, optimizer in with_optimizers(case for case in CASES if case not in LIKE_OTHERS):
        words = {"backend__strategy": "parameter_server", "backend__join": "step"}
        (ours,) = several([(case, optimizer)], backend="tf_distribute", **words)
        (reference,) = several([(case, optimizer)], backend="local")
        references[f"{case} {optimizer}"] = reference
        found["cases"][f"{case} {optimizer}"] = difference(reference, ours)
        found["logs"][f"{case} {optimizer}"] = [ours.history, reference.history]
    for name in ("added", "returned_whole"):  # sums over examples, for both keys of loss_scope
        words = {"backend__strategy": "parameter_server", "backend__join": "step"}
        (ours,) = losses.outcomes([name], backend="tf_distribute", **words)
        (reference,) = losses.outcomes([name], backend="local")
        found["cases"][name] = difference(reference, ours)
        found["logs"][name] = [ours.history, reference.history]
    words = {**words, "backend__min_shard_bytes": 64}
    (ours,) = several([("positions_accumulated", "adamw")], backend="tf_distribute", **words)
    found["tables in pieces"] = difference(references["positions_accumulated adamw"], ours)
    found["asynchronous"] = asynchronous()
    found["left"] = left_in_validation()
    found["cut"] = [cut_variables(digits_model), cut_variables(averaged_embeddings)]
    found["resumed"] = resumed()
    return found


def contracts() -> dict[str, str]:
    """What is wrong with each model of the zoo, each precision and each stock callback."""
    checks: dict[str, Callable[[], Any]] = {}
    for name in MODELS:
        checks[name] = lambda name=name: model_of_the_zoo(name)
    for policy, bad in (("mixed_float16", 18), ("mixed_bfloat16", None)):
        checks[f"{policy} {bad}"] = lambda p=policy, b=bad: half_precision_equals(p, b)
    for name in stock_callbacks.TOUCHING:
        checks[f"callback {name}"] = lambda name=name: stock_callback(name)
    return {name: said(check) for name, check in checks.items()}


def said(check: Callable[[], Any]) -> str:
    """The error of a check; nothing if it holds."""
    keras_state.reset()
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def model_of_the_zoo(name: str) -> None:
    runs = [running.train([name], **words)[name][0] for words in (IN_STEP, {"name": "local"})]
    compare_zoo(name, runs[1], runs[0])
    slots, variable = running.largest_difference(runs[0].slots, runs[1].slots)
    assert slots <= 1e-10, f"{variable} differs by {slots:.1e}"


def half_precision_equals(policy: str, bad: int | None) -> None:
    ours = half_precision("parameter_server", policy, bad, backend__join="step")
    reference = half_precision("local", policy, bad)
    assert ours[1:] == reference[1:], (ours[1:], reference[1:])
    for mine, value in zip(ours[0], reference[0], strict=True):
        np.testing.assert_allclose(mine, value, rtol=0, atol=1e-6)


def loops() -> dict[str, Any]:
    """Loops of the user's own, and asynchronous steps of one."""
    names = [name for name in LOOPS if name not in ("in_branches", "in_functions")]
    pairs = zip(outcomes("parameter_server", names), outcomes("local", names), strict=True)
    gaps = {n: largest_difference(*pair) for n, pair in zip(names, pairs, strict=True)}
    found = {"gaps": gaps, "scheduled": scheduled(), "in a function": in_a_function()}
    found["ragged"] = predicted("tf_distribute", strategy="parameter_server")
    return found | {"counted": counted_by_sums(), "reset": reset_in_a_step()}


def counted_by_sums() -> list[float]:
    """Positives that 60 asynchronous steps have counted in metrics that Keras reads and assigns."""
    with trainer() as it:
        with it.scope():
            precision, recall = keras.metrics.Precision(), keras.metrics.Recall()
            area = keras.metrics.AUC(num_thresholds=5)

        def step(x: tf.Tensor) -> None:
            for metric in (precision, recall, area):
                metric.update_state(tf.ones_like(x), tf.ones_like(x, tf.float32))

        for batch in it.distribute(tf.data.Dataset.range(240).batch(4)):
            it.schedule(step, batch)
        it.join()
        metrics = (precision, recall, area)
        return [float(np.max(metric.true_positives.numpy())) for metric in metrics]


def reset_in_a_step() -> str:
    """What is said of a `train_step` that resets a metric."""

    class Resetting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            for metric in self.metrics:
                metric.reset_state()
            return super().train_step(data)

    with trainer("data.batch_size=8") as it:
        model = Resetting([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            it.fit(model, (np.ones((16, 4)), np.ones((16, 1))))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def scheduled() -> list[Any]:
    """What 12 asynchronous steps have added, and how many at most were at work at once: each waits
    until some two were."""
    with trainer() as it:
        with it.scope():
            seen = keras.metrics.Sum()
            working, at_once = tf.Variable(0), tf.Variable(0)

        def step(x: tf.Tensor) -> dict[str, tf.Tensor]:
            working.assign_add(1)
            seen.update_state(x)
            most, end = tf.constant(0), tf.timestamp() + 20.0
            while most < 2 and tf.timestamp() < end:
                most = tf.maximum(working.read_value(), at_once.read_value())
            at_once.assign(most)
            working.assign_sub(1)
            return {"sum": tf.reduce_sum(x), "most": most}

        for batch in it.distribute(tf.data.Dataset.range(48).batch(4)):
            it.schedule(step, batch)
        results = it.join()
        sums = [int(each["sum"]) for each in results]
        return [sums, float(seen.result()), max(int(each["most"]) for each in results)]


def in_a_function() -> str:
    with trainer() as it:
        try:
            tf.function(lambda: it.run(lambda: None))()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def stock_callback(name: str) -> None:
    place = FOLDER / "callbacks" / str(list(stock_callbacks.SCENARIOS).index(name))
    stock_callbacks.compare(
        stock_callbacks.play(name, place, tuple(IN_STEP.items())), stock_callbacks.alone(name)
    )


def trainer(*more: str, callbacks: Any = (), **words: Any) -> Trainer:
    settings = [f"backend.{key}={value}" for key, value in words.items()]
    return Trainer(QUIET, callbacks, overrides=[*SERVERS, *settings, *more])


def digits_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def asynchronous() -> dict[str, Any]:
    """Digits, with asynchronous workers; the counters and metrics must be exact."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    words = ["trainer.epochs=8", "data.batch_size=32"]
    with Trainer(QUIET, overrides=["backend=local", *words]) as it:
        it.fit(digits_model, (x[:1400], y[:1400]))
        one = it.evaluate(it.model, (x[1400:], y[1400:]))["accuracy"]
    with trainer(*words) as it:
        it.fit(digits_model, (x[:1400], y[:1400]), validation_data=(x[1400:], y[1400:]))
        logs = {key: values[-1] for key, values in it.model.history.history.items()}
        steps = int(it.model.optimizer.iterations.numpy())
        counted = [float(m.count.numpy()) for m in it.model.metrics if m.name == "loss"]
        guesses = it.predict(it.model, x[1400:]).argmax(-1)
        evaluated = it.evaluate(it.model, (x[1400:], y[1400:]))
    return {
        "logs": logs,
        "steps": steps,
        "counted": counted,
        "one process": one,
        "right": float((guesses == y[1400:]).mean()),
        "evaluated": evaluated,
    }


def left_in_validation() -> float:
    """An error while workers still evaluate; the examples that the training has counted."""

    class Leave(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                raise KeyError(batch)

    x, y = load_digits(return_X_y=True)
    with trainer("data.batch_size=32", callbacks=[Leave()]) as it:
        with suppress(KeyError):
            it.fit(digits_model, (x[:320], y[:320]), validation_data=(x[320:], y[320:]))
        it.state.program.finish()
        return sum(float(m.count.numpy()) for m in it.model.metrics if m.name == "loss")


def averaged_embeddings() -> keras.Model:
    """Sparse gradients, weights that decay, and their moving averages, of the digits' pixels."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((64,)),
        keras.layers.Rescaling(16.0),
        keras.layers.Embedding(17, 32),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    averaged = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 5}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1, **averaged), loss)
    return model


def cut_variables(build: Callable[[], keras.Model]) -> dict[str, Any]:
    """Variables in pieces, on two servers."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    results = []
    for words in (
        [*SERVERS, "backend.join=step", "backend.min_shard_bytes=1024"],
        ["backend=local"],
    ):
        with Trainer(QUIET, overrides=[*words, "trainer.max_steps=12"]) as it:
            it.fit(build, (x, y))
            kinds = {type(v.value).__name__ for v in it.model.variables}
            results.append((kinds, [np.array(v.numpy()) for v in variables_of(it.model)]))
    (kinds, ours), (_, reference) = results
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, reference, strict=True))
    return {"kinds": sorted(kinds), "difference": gap}


def resumed() -> list[float]:
    """Epochs on one process, on servers, and on one process again, each from the checkpoint of
    the one before; the largest difference from all of them on one, after each."""
    x, y = load_digits(return_X_y=True)
    x, y = (x[:480] / 16).astype("float32"), y[:480]
    servers, local = [*SERVERS, "backend.join=step"], ["backend=local"]
    ends: dict[str, list[list[np.ndarray]]] = {}
    for name, backends in (
        ("moving", (["backend=data_parallel"], servers, local)),
        ("local", (local,) * 3),
    ):
        place = [f"checkpoint.dir={FOLDER / name}", "checkpoint.every=1ep"]
        for epochs, words in enumerate(backends, start=1):
            with Trainer(QUIET, overrides=[*words, *place, f"trainer.epochs={epochs}"]) as it:
                it.fit(digits_model, (x, y))
                weights = [np.array(v.numpy()) for v in variables_of(it.model)]
                ends.setdefault(name, []).append(weights)
    steps = zip(ends["moving"], ends["local"], strict=True)
    return [max(float(np.abs(a - b).max()) for a, b in zip(*pair, strict=True)) for pair in steps]


def variables_of(model: keras.Model) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


if __name__ == "__main__":
    main()
