"""What the coordinator of a cluster with parameter servers does in `test_launch`.

`ktrainer launch --workers 2 --servers 2 servers_script.py FOLDER` writes what it found to
FOLDER/found.json. Workers and servers come as far as the first Trainer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ktrainer import Trainer

# isort: split
import keras
import numpy as np
from sklearn.datasets import load_digits

from tests.contracts import running
from tests.dist.cases import difference, several

FOLDER = Path(sys.argv[1])
QUIET = {"logging": {"progress": "none", "csv": False}}
SERVERS = ["backend=tf_distribute", "backend.strategy=parameter_server"]
CASES = [("plain", "adamw"), ("sample_weights", "sgd"), ("regularised", "adamw")]
CASES += [("accumulated", "sgd"), ("several_outputs", "sgd")]


def main() -> None:
    os.chdir(FOLDER)
    trainer(join="step").close()  # a worker or server does not return from here
    found: dict[str, Any] = {"cases": {}, "logs": {}}
    for case, optimizer in CASES:
        words = {"backend__strategy": "parameter_server", "backend__join": "step"}
        (ours,) = several([(case, optimizer)], backend="tf_distribute", **words)
        (reference,) = several([(case, optimizer)], backend="local")
        found["cases"][case] = difference(reference, ours)
        found["logs"][case] = [ours.history, reference.history]
    found["many metrics"] = many_metrics()
    found["asynchronous"] = asynchronous()
    found["cut"] = cut_variables()
    found["resumed"] = resumed()
    (FOLDER / "found.json").write_text(json.dumps(found))


def trainer(*more: str, **words: Any) -> Trainer:
    settings = [f"backend.{key}={value}" for key, value in words.items()]
    return Trainer(QUIET, overrides=[*SERVERS, *settings, *more])


def many_metrics() -> list[dict[str, list[float]]]:
    """AUC, precision, F1, R2 and more; the History of the servers and of one process."""
    server = {"name": "tf_distribute", "strategy": "parameter_server", "join": "step"}
    runs = (server, {"name": "local"})
    return [running.train(["many_metrics"], **words)["many_metrics"][0].history for words in runs]


def digits_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def asynchronous() -> dict[str, Any]:
    """Digits, with workers that go on by themselves; the counters and metrics must be exact."""
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


def cut_variables() -> dict[str, Any]:
    """Variables in pieces, on two servers."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    results = []
    for words in (
        [*SERVERS, "backend.join=step", "backend.min_shard_bytes=1024"],
        ["backend=local"],
    ):
        with Trainer(QUIET, overrides=[*words, "trainer.max_steps=12"]) as it:
            it.fit(digits_model, (x, y))
            kinds = {type(v.value).__name__ for v in it.model.variables}
            results.append((kinds, [np.array(v.numpy()) for v in it.model.variables]))
    (kinds, ours), (_, reference) = results
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, reference, strict=True))
    return {"kinds": sorted(kinds), "difference": gap}


def resumed() -> float:
    """A checkpoint of the servers' weights goes on in one process; the largest difference."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    ends = []
    for name, first in (("servers", [*SERVERS, "backend.join=step"]), ("local", ["backend=local"])):
        place = [f"checkpoint.dir={FOLDER / name}", "checkpoint.every=1ep", "trainer.epochs="]
        for words, epochs in ((first, 1), (["backend=local"], 2)):
            with Trainer(QUIET, overrides=[*words, *place[:2], f"{place[2]}{epochs}"]) as it:
                it.fit(digits_model, (x, y))
                weights = [np.array(v.numpy()) for v in it.model.variables]
        ends.append(weights)
    return max(float(np.abs(a - b).max()) for a, b in zip(*ends, strict=True))


if __name__ == "__main__":
    main()
