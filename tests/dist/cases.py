"""Small trainings that data parallelism must repeat exactly: models, data and settings.

Each case is a function that returns a `Case`; `train` runs one under a backend and returns what
can be compared. 241 examples in batches of 32 leave a last batch of 17, which no world size
divides; 3 epochs are 24 updates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.dist.harness import keras_state

EXAMPLES, BATCH, EPOCHS = 241, 32, 3


@dataclass
class Case:
    """One training."""

    build: Callable[[], Any]
    data: Any
    validation: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    class_weight: dict[int, float] | None = None


@dataclass
class Outcome:
    """What a training left behind, on one rank."""

    weights: dict[str, np.ndarray]
    history: dict[str, list[float]]
    checksum: int
    evaluated: dict[str, float]


def optimizer(name: str, **settings: Any) -> Any:
    import keras

    if name == "sgd":
        return keras.optimizers.SGD(0.05, momentum=0.9, **settings)
    return keras.optimizers.AdamW(0.01, **settings)


def vectors(classes: int = 3, features: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, features))
    y = (x @ random.normal(size=(features, classes))).argmax(-1)
    return x, y


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _mlp(name: str, middle: tuple[Any, ...] = (), **compiled: Any) -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            *middle,
            keras.layers.Dense(3),
        ]
    )
    model.compile(compiled.pop("optimizer", optimizer(name)), _loss(), **compiled)
    return model


def plain(name: str) -> Case:
    return Case(lambda: _mlp(name, metrics=["accuracy"]), vectors(), validation=vectors())


def sample_weights(name: str) -> Case:
    weights = np.random.default_rng(1).random(EXAMPLES)
    build = lambda: _mlp(name, weighted_metrics=["accuracy"])  # noqa: E731
    return Case(build, (*vectors(), weights))


def class_weights(name: str) -> Case:
    return Case(lambda: _mlp(name), vectors(), class_weight={0: 1.0, 1: 3.0, 2: 0.2})


def synchronized_batch_norm(name: str) -> Case:
    import keras

    build = lambda: _mlp(name, (keras.layers.BatchNormalization(synchronized=True),))  # noqa: E731
    return Case(build, vectors())


def regularised(name: str) -> Case:
    """Weight and activity regularisers, and a layer with `add_loss`."""
    import keras

    class Confident(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build() -> Any:
        dense = keras.layers.Dense(
            16, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"
        )
        return _mlp(name, (dense, Confident()))

    return Case(build, vectors())


def accumulated(name: str) -> Case:
    settings = {"trainer.accumulate": 4, "data.batch_size": BATCH // 4}
    return Case(lambda: _mlp(name, metrics=["accuracy"]), vectors(), settings=settings)


def clipped_by_config(name: str) -> Case:
    return Case(lambda: _mlp(name), vectors(), settings={"trainer.clip.global_norm": 0.1})


def clipped_by_optimizer(name: str) -> Case:
    return Case(lambda: _mlp(name, optimizer=optimizer(name, clipvalue=0.01)), vectors())


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    x = random.integers(1, 12, (EXAMPLES, 9))
    for row, length in zip(x, random.integers(1, 10, EXAMPLES), strict=True):
        row[length:] = 0
    return x, np.roll(x, -1, 1)


def _language_model(name: str, *middle: Any) -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            keras.layers.Embedding(12, 6, mask_zero=True),
            *middle,
            keras.layers.Dense(12),
        ]
    )
    model.compile(optimizer(name), _loss(), metrics=["accuracy"])
    return model


def masked(name: str) -> Case:
    """Sequences of different lengths: the loss of each token counts, padding does not."""
    return Case(lambda: _language_model(name), _tokens())


def masked_gru(name: str) -> Case:
    """The same with a loop, which takes long to trace."""
    import keras

    def build() -> Any:
        return _language_model(name, keras.layers.GRU(8, return_sequences=True))

    return Case(build, _tokens())


def masked_accumulated(name: str) -> Case:
    settings = {"trainer.accumulate": 2, "data.batch_size": BATCH // 2}
    return Case(lambda: _language_model(name), _tokens(), settings=settings)


def positions(name: str) -> Case:
    """Tokens with a table of positions that is looked up once a batch, and one that is looked up
    for each example."""
    import keras
    from keras import ops

    class Placed(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = keras.layers.Embedding(12, 6)
            self.places = keras.layers.Embedding(9, 6)
            self.each = keras.layers.Embedding(9, 6)

        def call(self, tokens: Any) -> Any:
            length = ops.shape(tokens)[1]
            x = self.tokens(tokens) + self.places(ops.arange(length))
            return x + self.each(ops.broadcast_to(ops.arange(length), ops.shape(tokens)))

    def build() -> Any:
        layers = [Placed(), keras.layers.LayerNormalization(), keras.layers.Dense(12)]
        model = keras.Sequential([keras.Input((9,), dtype="int32"), *layers])
        model.compile(optimizer(name), _loss(), metrics=["accuracy"])
        return model

    return Case(build, _tokens())


def positions_accumulated(name: str) -> Case:
    case = positions(name)
    case.settings = {"trainer.accumulate": 2, "data.batch_size": BATCH // 2}
    return case


def several_outputs(name: str) -> Case:
    """Two inputs, two outputs, a loss of each kind of reduction, loss weights."""
    import keras

    x, y = vectors()

    def build() -> Any:
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.concatenate([a, b]))
        outputs = {
            "kind": keras.layers.Dense(3, name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        losses = {
            "kind": _loss(),
            "size": keras.losses.MeanSquaredError(reduction="sum"),
        }
        model.compile(optimizer(name), losses, loss_weights={"kind": 1.0, "size": 1e-3})
        return model

    return Case(build, ({"a": x, "b": x[:, ::-1]}, {"kind": y, "size": x.sum(1, keepdims=True)}))


CASES = {
    case.__name__: case
    for case in (
        plain,
        sample_weights,
        class_weights,
        synchronized_batch_norm,
        regularised,
        accumulated,
        clipped_by_config,
        clipped_by_optimizer,
        masked,
        masked_accumulated,
        positions,
        several_outputs,
        positions_accumulated,
    )
}


def with_optimizers(names: Iterable[str]) -> list[tuple[str, str]]:
    """Cases with one of two optimizers in turn; slices of a row that is looked up several times
    need one that squares each of them."""
    sliced = positions_accumulated.__name__
    return [(n, "sgd" if i % 2 and n != sliced else "adamw") for i, n in enumerate(names)]


SLOW = {masked_gru.__name__: masked_gru}  # for one test


def train(
    case: str | Case,
    name: str = "sgd",
    floatx: str = "float64",
    **settings: Any,
) -> Outcome:
    """Run a case on this rank; `settings` are configuration keys with `__` for dots."""
    import keras

    from ktrainer import Trainer

    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    case = {**CASES, **SLOW}[case](name) if isinstance(case, str) else case
    overrides = {"data.batch_size": BATCH, "trainer.epochs": EPOCHS, **case.settings}
    overrides |= {key.replace("__", "."): value for key, value in settings.items()}
    config = {"logging": {"progress": "none", "csv": False}}
    words = [f"{key}={value}" for key, value in overrides.items()]
    with Trainer(config, overrides=[w for w in words if w.startswith("backend=")] + words) as it:
        history = it.fit(
            case.build, case.data, validation_data=case.validation, class_weight=case.class_weight
        )
        model = it.model
        evaluated = it.evaluate(model, case.data)
        # Names without the numbers that Keras appends, which count models made before.
        variables = [*model.variables, *model.optimizer.variables]
        weights = {
            f"{i}:{v.path}": np.asarray(v.numpy(), np.float64) for i, v in enumerate(variables)
        }
        raw = b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in variables)
        return Outcome(weights, history.history, zlib.crc32(raw), evaluated)


def several(cases: list[tuple[str, str]], floatx: str = "float64", **settings: Any) -> Any:
    """Run several (case, optimizer) in one task; the outcomes in order. Losses are not compared
    before the first update unless `settings` say so."""
    settings = {"health__verify": "off", **settings}
    outcomes = []
    for case, name in cases:
        outcomes.append(train(case, name, floatx, **settings))
        keras_state.clear()
    return outcomes


def difference(a: Outcome, b: Outcome) -> float:
    """The largest difference of any variable, relative to its largest element."""
    assert len(a.weights) == len(b.weights)
    worst = 0.0
    for x, y in zip(a.weights.values(), b.weights.values(), strict=True):
        assert np.isfinite(y).all()
        scale = np.abs(x).max(initial=0.0)
        gap = np.abs(x - y).max(initial=0.0)
        # A slot that is zero but for round-off (of a regularised-away bias, say) has no scale.
        worst = max(worst, gap / max(scale, 1e-3))
    return worst


def compare(
    expected: list[Outcome],
    ranks: list[list[Outcome]],
    names: list[Any],
    weights: float = 1e-10,
    logs: float = 1e-9,
) -> dict[str, float]:
    """Check weights, slots, logs and evaluation of several cases, on every rank.

    Args:
        expected: what one process gives, for each case.
        ranks: what each rank gives for them.
        names: of the cases.
        weights: largest difference of a variable, relative to its largest element.
        logs: relative tolerance of logs and evaluation.

    Returns:
        The largest difference of each case.
    """
    largest = {}
    for i, name in enumerate(names):
        ours = [rank[i] for rank in ranks]
        assert len({outcome.checksum for outcome in ours}) == 1, f"{name}: ranks differ"
        largest[str(name)] = difference(expected[i], ours[0])
        for outcome in ours:
            assert list(outcome.history) == list(expected[i].history), name
            for key, values in expected[i].history.items():
                np.testing.assert_allclose(outcome.history[key], values, logs, err_msg=name)
            for key, value in expected[i].evaluated.items():
                np.testing.assert_allclose(outcome.evaluated[key], value, logs, err_msg=name)
    print({key: f"{value:.1e}" for key, value in largest.items()})
    assert max(largest.values()) <= weights, largest
    return largest
